// Declares the simulator, which runs a policy on a trace by sizes and times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

struct Outcome {
  int64_t peak_bytes = 0;     // the most that is in memory at a time, from the end of forward on
  double seconds = 0;         // of replayed operations and of storage formats
  int64_t forward_bytes = 0;  // in memory at the end of forward
};

// The course of backward, by use. Everything that a use causes happens during it.
struct Timeline {
  std::vector<int64_t> peak_bytes;   // after forward, then during each use
  std::vector<int32_t> restored_at;  // per value: the use that restored it from its storage format, or -1
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
//
// Throws UserError if the policy is not possible.
Outcome simulate(const Trace& trace, const Policy& policy, Timeline* timeline = nullptr);

// Reuses its buffers from one run to the next. The index must outlive this object.
class Simulator {
 public:
  explicit Simulator(const TraceIndex& index);

  // Returns which needed value this policy cannot provide, and why; empty if there is none.
  std::string first_error(const Policy& policy);
  // Requires a policy without such an error.
  Outcome run(const Policy& policy, Timeline* timeline = nullptr);

 private:
  enum class Presence : uint8_t { kAbsent, kInStorageFormat, kAsItIs };

  void find_needed(const std::vector<int32_t>& releases);
  void make_present(int32_t value);
  void restore(int32_t value);
  void replay(int32_t op);
  void drop_one_need(int32_t value);
  void note_peak(int64_t bytes) { peak_now_ = bytes > peak_now_ ? bytes : peak_now_; }

  struct Frame {
    int32_t op;
    int32_t next_read;
  };

  const TraceIndex& index_;
  std::vector<int64_t> bytes_;  // per value; a dense copy, because the inner loop reads it
  const Policy* policy_ = nullptr;
  std::vector<int32_t> needs_;           // per value: releases to come, and operations to be replayed that read it
  std::vector<int32_t> needed_outputs_;  // per operation not replayed yet: its needed outputs that are recomputed
  std::vector<uint8_t> is_replayed_;     // per operation
  std::vector<Presence> presence_;       // per value
  std::vector<Frame> frames_;
  std::vector<int32_t> dropped_;
  Timeline* timeline_ = nullptr;
  int32_t now_ = 0;
  int64_t bytes_now_ = 0;
  int64_t peak_now_ = 0;
  double seconds_ = 0;
};

}  // namespace drivetrain::budget
