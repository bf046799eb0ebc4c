// Declares Replay, which provides the values that backward asks for by calling recorded operations again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "budget/recorder/device_timer.h"
#include "budget/recorder/memory_tracker.h"
#include "budget/recorder/read_checks.h"
#include "budget/recorder/tape.h"
#include "budget/recorder/value_store.h"
#include "recompute/ambient.h"

namespace drivetrain::budget {

// A missing value is replayed from its operation's inputs, which are replayed in turn where they are missing as well.
// Values and arguments are freed as soon as neither a saved tensor nor another pending operation needs them.
class Replay {
 public:
  Replay(Tape& tape, ValueStore& store, const ReadChecks& checks, std::shared_ptr<MemoryTracker> tracker)
      : tape_(tape), store_(store), checks_(checks), tracker_(std::move(tracker)) {}

  // Counts the users of each value. Called once, at the end of the forward pass.
  void count_users();
  // Lets go of the values that have no user.
  void let_go_unused();
  // Marks the graph as unusable: a later use of it raises.
  void abandon() { is_abandoned_ = true; }

  // Raises CheckpointError after abandon(), or if a replay was interrupted while it wrote over a value.
  void check_usable() const;
  // Returns a view of a value, replayed if needed, and starts the prefetches that follow it.
  at::Tensor take(const TensorRef& ref);
  // Notes that one user of a value is gone.
  void drop_user(int32_t value);
  // Notes that autograd has freed one saved tensor of the value.
  void release(int32_t value);

  // Calls an operation again with the tensor that `tensor_of` returns for each reference, and measures the time if
  // there is a timer to set. Returns the tensors of its results, in the order of op.writes.
  std::vector<at::Tensor> call(RecordedOp& op, const std::function<at::Tensor(const TensorRef&)>& tensor_of,
                               std::optional<DeviceTimer>* timer = nullptr) const;

  // Sets a function that is called after each replay, with the operation, its time and its results.
  using Observer = std::function<void(int32_t, DeviceTimer, const std::vector<at::Tensor>&)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }

 private:
  bool is_needed(const RecordedOp& op) const;
  std::unordered_map<int32_t, at::Tensor> writable(const RecordedOp& op);
  void materialize(int32_t value);
  void replay(int32_t op);

  Tape& tape_;
  ValueStore& store_;
  const ReadChecks& checks_;
  const std::shared_ptr<MemoryTracker> tracker_;
  const recompute::Switches switches_ = recompute::Switches::now();  // when the forward pass began
  Observer observer_;
  bool has_counted_users_ = false;
  bool is_abandoned_ = false;
  bool is_interrupted_ = false;  // a replay failed after it had taken over the memory of a value
};

}  // namespace drivetrain::budget
