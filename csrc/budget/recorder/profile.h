// Declares Profile, which measures the operations of a training step before there is a plan, and keeps few values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "budget/recorder/device_timer.h"
#include "budget/recorder/parts.h"
#include "budget/recorder/tape.h"
#include "budget/recorder/value_store.h"

namespace drivetrain::budget {

// The rows of a trace, for the solver and for tables, with the fields that `python/drivetrain/budget/trace.py` names.
using ValueTrace = std::tuple<int64_t, bool, bool, int32_t, std::vector<FormatCost>>;
using OpTrace = std::tuple<std::string, int32_t, std::optional<double>, std::vector<int32_t>, std::vector<int32_t>>;
using AutogradSave = std::pair<int32_t, int32_t>;
// The value that backward takes or that autograd frees, whether it is freed, and the order over all passes.
using BackwardUse = std::tuple<int32_t, bool, int64_t>;

// Forward calls each operation twice, to check that it is deterministic. The values that autograd saves are not stored:
// backward replays them, which times the operations where backward needs them, and compares their bits.
class Profile {
 public:
  Profile(Tape& tape, ValueStore& store);

  // Fills memory that an operation returned with arbitrary contents. The allocator may return memory of an earlier
  // step, whose stale contents would look like recomputed ones.
  static void fill_with_garbage(const at::Tensor& tensor);

  // Called in the forward pass, with the memory of each value that an operation has read, as it was before.
  using Memory = std::unordered_map<int32_t, at::Tensor>;
  // Calls the operation that will have this index once more. Returns whether its results are `made`, bit by bit.
  bool repeats(RecordedOp& op, int32_t index, const std::vector<at::Tensor>& made, const Memory& memory);
  // Notes that autograd saves a value that can be replayed. Returns whether to store it nevertheless.
  bool stores_saved(int32_t value, const at::Tensor& tensor);
  // Autograd saves a value during the operation of this index, or before it.
  void note_save(int32_t op, int32_t value) { saves_.emplace_back(op, value); }
  Parts& parts() { return parts_; }

  // Called in backward.
  void note_use(int32_t value, bool is_release) {
    uses_.emplace_back(value, is_release, tape_.shared->tracker.next_use());
  }
  void note_replay(int32_t op, DeviceTimer timer, const std::vector<at::Tensor>& results);
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
  std::vector<uint64_t> arguments() const;  // RecordedOp::arguments

 private:
  Tape& tape_;
  ValueStore& store_;

  const int64_t begin_;
  std::vector<BackwardUse> uses_;
  std::vector<AutogradSave> saves_;
  std::vector<std::pair<int32_t, DeviceTimer>> forward_timers_, backward_timers_;  // per operation
  Parts parts_;
  bool has_failed_ = false;
};

}  // namespace drivetrain::budget
