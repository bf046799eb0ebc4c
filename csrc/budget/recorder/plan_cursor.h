// Defines PlanCursor, which finds the planned operation for each operation of a pass, also on another path.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "budget/recorder/tape.h"

namespace drivetrain::budget {

// A pass may leave out operations of its plan, insert some, or repeat some. The cursor expects the operations of the
// plan in their order. Other operations match nothing. If the expected one does not come soon, the cursor moves to
// another place of the plan that has the last operations in a row.
class PlanCursor {
 public:
  // plan: null matches nothing.
  explicit PlanCursor(const TapePlan* plan) : plan_(plan) {}

  // Returns the index of the planned operation for one with that name, which begins; -1: none matches.
  int32_t find(const std::string& name) const {
    if (plan_ == nullptr) return -1;
    if (static_cast<size_t>(next_) < plan_->ops.size() && plan_->ops[next_].name == name) return next_;
    if (num_unmatched_ < kPatience && static_cast<size_t>(next_) < plan_->ops.size()) return -1;
    const auto found = plan_->by_name.find(name);
    if (found == plan_->by_name.end()) return -1;
    const auto ahead = std::lower_bound(found->second.begin(), found->second.end(), next_);
    for (auto at = ahead; at != found->second.end(); ++at) {
      if (run_to(*at) >= (*at < next_ + kNear ? kShortRun : kLongestRun)) return *at;
    }
    for (auto at = ahead; at != found->second.begin();) {
      if (run_to(*--at) == kLongestRun) return *at;
    }
    return -1;
  }

  // Moves behind that planned operation; -1: the operation has matched none. The name must outlive the cursor.
  void advance(int32_t planned, const std::string& name) {
    if (planned >= 0) next_ = planned + 1;
    num_unmatched_ = planned >= 0 ? 0 : num_unmatched_ + 1;
    std::copy_backward(last_.begin(), last_.end() - 1, last_.end());
    last_[0] = &name;
  }

  // Returns the planned operation that is expected next.
  int32_t next() const { return next_; }

 private:
  // The pass goes on at the nearest operation behind the expected one that ends a run of two equal operations. To go
  // farther, or back as a loop does that repeats more often, takes a longer run, as short ones occur everywhere.
  static constexpr int32_t kNear = 64;  // operations
  static constexpr int32_t kShortRun = 2;
  // Inserted operations may occur elsewhere in the plan, as layers resemble each other. Most insertions are shorter.
  static constexpr int32_t kPatience = 4;  // operations that match nothing before the pass goes on elsewhere
  static constexpr int32_t kLongestRun = 4;

  // Returns how many operations before the planned one, and this one, equal the last ones of the pass.
  int32_t run_to(int32_t planned) const {
    int32_t run = 1;
    for (const std::string* last : last_) {
      if (last == nullptr || run > planned || plan_->ops[planned - run].name != *last) break;
      ++run;
    }
    return run;
  }

  const TapePlan* const plan_;
  int32_t next_ = 0;
  int32_t num_unmatched_ = 0;                               // operations in a row
  std::array<const std::string*, kLongestRun - 1> last_{};  // the names of the last operations, the latest first
};

}  // namespace drivetrain::budget
