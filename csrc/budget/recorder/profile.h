// Declares Profile, which measures the operations of a training step before there is a plan, and keeps few values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "budget/recorder/device_timer.h"
#include "budget/recorder/memory_tracker.h"
#include "budget/recorder/parts.h"
#include "budget/recorder/read_checks.h"
#include "budget/recorder/replay.h"
#include "budget/recorder/tape.h"
#include "budget/recorder/value_store.h"

namespace drivetrain::budget {

// The rows of a trace, for the solver and for tables. `python/drivetrain/budget/trace.py` names the same fields.
struct ValueTrace {
  int64_t bytes;
  bool can_keep, can_recompute;
  int32_t replaces;  // -1: none
  std::vector<FormatCost> formats;
};
struct OpTrace {
  std::string name;
  int32_t module;
  std::optional<double> seconds;  // none: it was not called again
  std::vector<int32_t> reads, writes;
  uint64_t arguments;
};
// Backward takes a value, or autograd frees it.
struct BackwardUse {
  int32_t value;
  bool is_release;
  int64_t order;  // over all passes of a memory tracker
};
// Autograd saves a value during the operation of this index, or before it.
struct AutogradSave {
  int32_t op;
  int32_t value;
};

// Operations that do not repeat their results, by what Profile's kind_of() returns. All passes of a recorder share it.
using KindsOfOps = std::set<uint64_t>;

// Forward calls each operation twice, to check that it is deterministic. The values that autograd saves are not stored:
// backward replays them, which times the operations where backward needs them, and compares their bits.
class Profile {
 public:
  Profile(Tape& tape, ValueStore& store, Replay& replay, const ReadChecks& checks,
          std::shared_ptr<MemoryTracker> tracker, std::shared_ptr<KindsOfOps> unrepeatable);

  // Fills memory that an operation returned with arbitrary contents. The allocator may return memory of an earlier
  // step, whose stale contents would look like recomputed ones.
  static void fill_with_garbage(const at::Tensor& tensor);

  // Called in the forward pass, with the memory of each value that an operation has read, as it was before.
  using Memory = std::unordered_map<int32_t, at::Tensor>;
  // Calls the operation that will have this index once more. Returns whether its results are `made`, bit by bit.
  bool repeats(RecordedOp& op, int32_t index, const std::vector<at::Tensor>& made, const Memory& memory);
  // Notes that autograd saves a value that can be replayed. Returns whether to store it nevertheless.
  bool stores_saved(int32_t value, const at::Tensor& tensor);
  void note_save(AutogradSave save) { saves_.push_back(save); }
  Parts& parts() { return parts_; }

  // Called in backward.
  void note_take(int32_t value) { uses_.push_back({value, false, tracker_->next_use()}); }
  void note_release(int32_t value) { uses_.push_back({value, true, tracker_->next_use()}); }
  // Measures bytes and time of each storage format for a value that backward takes.
  void measure_formats(int32_t value);
  // Notes which operations cannot be replayed, because tensors that existed before the pass were changed or freed.
  void note_changed_inputs();
  // Returns whether a replay failed, or had other results than the forward pass. The step must run again.
  bool has_failed() const { return has_failed_; }

  int64_t begin() const { return begin_; }  // the order of the first use that could belong to the pass
  const std::vector<BackwardUse>& uses() const { return uses_; }
  const std::vector<AutogradSave>& saves() const { return saves_; }
  std::vector<ValueTrace> value_traces() const;
  std::vector<OpTrace> op_traces() const;

 private:
  void note_replay(int32_t op, DeviceTimer timer, const std::vector<at::Tensor>& results);

  Tape& tape_;
  ValueStore& store_;
  const Replay& replay_;
  const ReadChecks& checks_;
  const std::shared_ptr<MemoryTracker> tracker_;
  const std::shared_ptr<KindsOfOps> unrepeatable_;

  const int64_t begin_;
  std::vector<BackwardUse> uses_;
  std::vector<AutogradSave> saves_;
  std::vector<std::pair<int32_t, DeviceTimer>> forward_timers_, backward_timers_;  // per operation
  Parts parts_;
  bool has_failed_ = false;
};

}  // namespace drivetrain::budget
