// Declares the simulator, which runs a policy on a trace by sizes and times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

// The course of backward, by use. Everything that a use causes happens during it.
struct Timeline {
  std::vector<int64_t> peak_bytes;   // after forward, then during each use
  std::vector<int32_t> restored_at;  // per value: the use that restored it from its storage format, or -1
};

// Throws UserError if the policy is not possible.
Timeline timeline_of(const Trace& trace, const Policy& policy);

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
