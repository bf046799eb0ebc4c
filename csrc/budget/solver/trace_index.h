// Declares the index of a checked trace: which operations write and read each value, and which uses take it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "budget/solver/solver.h"

namespace drivetrain::budget {

// Stores lists of indices one after another.
class IndexLists {
 public:
  void add(int32_t index) { indices_.push_back(index); }
  void end_list() { ends_.push_back(static_cast<int32_t>(indices_.size())); }
  std::span<const int32_t> operator[](size_t list) const {
    return {indices_.data() + ends_[list], indices_.data() + ends_[list + 1]};
  }

 private:
  std::vector<int32_t> indices_;
  std::vector<int32_t> ends_ = {0};
};

// The trace must outlive this object.
struct TraceIndex {
  // Throws UserError if the trace contradicts itself.
  explicit TraceIndex(const Trace& trace);

  int32_t num_values() const { return static_cast<int32_t>(trace.values.size()); }
  int32_t num_ops() const { return static_cast<int32_t>(trace.ops.size()); }
  int32_t num_uses() const { return static_cast<int32_t>(trace.uses.size()); }
  bool is_external(int32_t value) const { return writer[value] < 0; }
  int64_t saved_bytes(int32_t value, int8_t entry) const {
    return entry == kSave ? trace.values[value].bytes : trace.values[value].formats[entry - 1].bytes;
  }

  const Trace& trace;
  std::vector<int32_t> writer;        // per value; -1: external
  IndexLists reads, writes;           // per operation; each value once, external ones excluded
  std::vector<int32_t> num_releases;  // per value
  std::vector<uint8_t> is_taken;      // per value
  std::vector<uint8_t> takes_over;  // per value: its operation reads the value that it replaces, which is not external
  std::vector<uint8_t> can_recompute;    // per value: the trace allows it, and all that its operation reads can be had
  std::vector<uint8_t> may_be_needed;    // per value: taken, or read by an operation that may be replayed
  std::vector<uint8_t> may_be_replayed;  // per operation: some output may be needed and can be recomputed
};

}  // namespace drivetrain::budget
