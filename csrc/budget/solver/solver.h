// Declares the solver of activation budgets: which saved values of a recorded forward pass to save and which to
// recompute. Includes no torch header.
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

struct Outcome {
  int64_t peak_bytes = 0;     // the most that is in memory at a time, from the end of forward on
  double seconds = 0;         // of replayed operations and of storage formats
  int64_t forward_bytes = 0;  // in memory at the end of forward
};

// Runs a step under a policy, by the sizes and times of its trace.
//
// A value is needed until backward has released it, and as long as an operation that will be replayed reads it. Saved
// values that are needed are in memory after forward. Taking a recomputed value replays its operation, after
// recomputing every missing value that this operation reads. Taking a value in a storage format restores it. A restored
// or recomputed value stays in memory until nothing needs it.
//
// While an operation is replayed, its reads and all of its outputs are in memory. An output that was there already
// counts twice unless it takes over memory. While a value is restored, its storage format is in memory too.
Outcome simulate(const Trace& trace, const Policy& policy);

struct Solution {
  Policy policy;  // the one with the smallest peak if none fits the budget
  Outcome outcome;
  double bound_seconds = 0;  // a lower bound on the seconds of every policy that fits
  bool is_feasible = false;
  int64_t smallest_bytes = 0;  // the smallest peak found
};

// Searches the policy that takes the least seconds with a peak of at most `budget_bytes`.
Solution solve(const Trace& trace, int64_t budget_bytes);

}  // namespace drivetrain::budget
