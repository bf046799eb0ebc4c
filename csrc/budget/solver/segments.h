// Keepings of a trace that is cut into segments: what crosses a cut is kept, so that each segment is replayed for
// itself and the best for each can be found alone.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

class Segments {
 public:
  enum class Cuts {
    kInValleys,   // where less crosses than around
    kEverywhere,  // for few ops, it takes longest
  };

  // Finds where to cut, and what each segment may cost. The index must outlive it.
  Segments(const TraceIndex& index, Cuts cuts, bool uses_min_cut);

  // The cuts and the keeping within them that take least seconds; none: whatever was found has a higher peak.
  // What one segment's replay does in another's memory is not seen: the simulator has the last word.
  std::optional<Keeping> best(int64_t budget_bytes) const;
  // With the smallest peak.
  Keeping smallest() const;

 private:
  // One way of keeping a segment.
  struct Choice {
    int64_t kept_bytes;  // at the end of forward, without what came from segments before
    int64_t peak_bytes;  // while backward is in it, without what was kept before it
    double seconds;
    Keeping keeping;  // of the values that it writes, in their order
  };
  using Menu = std::vector<Choice>;
  struct Segment {
    size_t first_cut;
    size_t menu;
  };
  // A segment of those that were put together.
  struct Step {
    size_t first_cut = 0;
    const Choice* choice = nullptr;
  };
  struct Kind;

  void find_last_readers();
  void find_cuts(Cuts cuts);
  void find_menus();
  bool is_crossing(int32_t value, int32_t op) const { return last_reader_[value] >= op; }
  Kind kind_of(int32_t first_op, int32_t end_op) const;
  Trace part(int32_t first_op, int32_t end_op) const;
  Menu menu_of(const Trace& part) const;
  std::optional<Keeping> smallest_within(int64_t budget_bytes) const;
  void put(const Step& step, size_t end_cut, Keeping& keeping) const;

  const TraceIndex& index_;
  const bool uses_min_cut_;
  std::vector<int32_t> last_reader_;  // per value: the last op that may be replayed and reads it
  IndexLists uses_of_value_;
  std::vector<int32_t> cuts_;                   // each before the op; the first is 0, the last the number of ops
  std::vector<std::vector<Segment>> segments_;  // by the cut at which they end
  std::vector<Menu> menus_;
};

}  // namespace drivetrain::budget
