// Declares the search over a trace cut into segments. Every value that crosses a cut is saved, so that each segment is
// replayed by itself and its best policies are found independently.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

class Segments {
 public:
  // Chooses the cuts, and finds the policies of every segment. The index must outlive this object.
  explicit Segments(const TraceIndex& index);

  // Returns the cuts and policies that take the least seconds, or nothing if every combination has a higher peak.
  // Ignores memory that one segment's replay needs while backward is in another: simulate the result.
  std::optional<Policy> best(int64_t budget_bytes) const;

 private:
  struct SegmentPolicy {
    int64_t saved_bytes;  // at the end of forward, excluding values of earlier segments
    int64_t peak_bytes;   // while backward is in the segment, excluding values saved before it
    double seconds;
    Policy policy;  // of the values that the segment writes, in their order
  };
  using Frontier = std::vector<SegmentPolicy>;  // none of them is worse than another in every respect
  struct Segment {
    size_t first_cut;
    size_t frontier;
  };
  // A segment of a combination.
  struct Part {
    size_t first_cut = 0;
    const SegmentPolicy* chosen = nullptr;
  };

  void find_last_readers();
  void find_cuts();
  void find_frontiers();
  bool is_crossing(int32_t value, int32_t op) const { return last_reader_[value] >= op; }
  uint64_t hash_of(int32_t first_op, int32_t end_op) const;
  Trace trace_of(int32_t first_op, int32_t end_op) const;
  Frontier frontier_of(const Trace& segment) const;
  void apply(const Part& part, size_t end_cut, Policy& policy) const;

  const TraceIndex& index_;
  std::vector<int32_t> last_reader_;            // per value: the last operation that may be replayed and reads it
  std::vector<int32_t> cuts_;                   // each before the operation; from 0 to the number of operations
  std::vector<std::vector<Segment>> segments_;  // by the cut at which they end
  std::vector<Frontier> frontiers_;
};

}  // namespace drivetrain::budget
