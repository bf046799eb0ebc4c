// A trace that was checked, and who writes, reads and uses what in it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "budget/solver/solver.h"

namespace drivetrain::budget {

// Lists of indices, one after another.
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

// The trace must outlive it.
struct TraceIndex {
  explicit TraceIndex(const Trace& trace);

  int32_t num_values() const { return static_cast<int32_t>(trace.values.size()); }
  int32_t num_ops() const { return static_cast<int32_t>(trace.ops.size()); }
  int32_t num_uses() const { return static_cast<int32_t>(trace.uses.size()); }
  bool is_external(int32_t value) const { return writer[value] < 0; }
  int64_t kept_bytes(int32_t value, int8_t way) const {
    return way == 0 ? trace.values[value].bytes : trace.values[value].forms[way - 1].bytes;
  }

  const Trace& trace;
  std::vector<int32_t> writer;           // per value; -1: external
  IndexLists reads, writes;              // per op; each value once, external ones left out
  std::vector<int32_t> num_tickets;      // per value: how often it is released
  std::vector<uint8_t> is_taken;         // per value
  std::vector<uint8_t> takes_over;       // per value: it replaces one that its op reads and that is not external
  std::vector<uint8_t> can_be_replayed;  // per value: it may be forgotten, and all that its op needs can be had
  std::vector<uint8_t> may_be_needed;    // per value: taken, or read by an op that may be replayed
  std::vector<uint8_t> may_be_replayed;  // per op: an output may be needed and can be replayed
};

}  // namespace drivetrain::budget
