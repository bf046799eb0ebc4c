// Declares a recorded step, policies of it, and its index: which operations write and read each value, and which uses
// take it.
#pragma once

#include <cstdint>
#include <vector>

namespace drivetrain::budget {

// A way to store a value other than as it is, for example packed or offloaded.
struct FormatPrice {
  int64_t bytes;   // that stay resident
  double seconds;  // that converting and restoring add to a step
};

// A storage in one version.
struct TraceValue {
  int64_t bytes = 0;
  bool can_save = true;              // false: a later operation overwrites its memory in place
  bool can_recompute = true;         // false: its operation cannot be replayed
  int32_t replaces = -1;             // the value whose memory it takes over in place, or -1
  std::vector<FormatPrice> formats;  // besides saving it as it is, which takes no time
};

struct TraceOp {
  double seconds = 0;
  std::vector<int32_t> reads, writes;
};

// Backward takes a saved value, or releases it. Every saved tensor is released once, after its last take. Some tensors
// are released without having been taken.
struct TraceUse {
  int32_t value;
  bool is_release;
};

// A recorded step. A value that no operation writes is external: it is always in memory and costs nothing.
struct Trace {
  std::vector<TraceValue> values;
  std::vector<TraceOp> ops;    // in order of forward
  std::vector<TraceUse> uses;  // in order of backward
};

// A policy maps each value to kRecompute, kSave (unchanged) or 1 + i, which saves it in its storage format i.
constexpr int8_t kRecompute = -1, kSave = 0;
using Policy = std::vector<int8_t>;  // per value; entries of values that the step never needs have no effect

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
  std::vector<int32_t> writer;              // per value; -1: external
  std::vector<std::vector<int32_t>> reads;  // per operation; each value once, external ones excluded
  std::vector<int32_t> num_releases;        // per value
  std::vector<uint8_t> is_taken;            // per value
  std::vector<uint8_t> takes_over;  // per value: its operation reads the value that it replaces, which is not external
  std::vector<uint8_t> can_recompute;    // per value: the trace allows it, and all that its operation reads can be had
  std::vector<uint8_t> may_be_needed;    // per value: taken, or read by an operation that may be replayed
  std::vector<uint8_t> may_be_replayed;  // per operation: some output may be needed and can be recomputed
};

}  // namespace drivetrain::budget
