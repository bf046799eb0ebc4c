// Declares PlanCursor, which finds the planned operation for each operation of a pass, also on another path.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "budget/recorder/tape.h"

namespace drivetrain::budget {

// A pass may leave out operations of its plan, insert some, or repeat some. The cursor expects the operations of the
// plan in their order. Other operations match nothing. If the expected one does not come soon, the cursor moves to
// another place of the plan that has the last operations in a row. plan_cursor.cpp has the numbers.
class PlanCursor {
 public:
  // plan: null matches nothing.
  explicit PlanCursor(const TapePlan* plan) : plan_(plan) {}

  // Returns the index of the planned operation for one with that name, which begins; -1: none matches.
  int32_t find(const std::string& name) const;
  // Moves behind that planned operation; -1: the operation has matched none. The name must outlive the cursor.
  void advance(int32_t planned, const std::string& name);

  // Returns the planned operation that is expected next.
  int32_t next() const { return next_; }

 private:
  static constexpr int32_t kLongestRun = 4;

  int32_t run_to(int32_t planned) const;

  const TapePlan* const plan_;
  int32_t next_ = 0;
  int32_t num_unmatched_ = 0;                               // operations in a row
  std::array<const std::string*, kLongestRun - 1> last_{};  // the names of the last operations, the latest first
};

}  // namespace drivetrain::budget
