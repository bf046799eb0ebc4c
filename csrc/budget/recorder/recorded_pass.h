// Declares RecordedPass: one forward pass from its recording to the end of its backward, which replays operations.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "budget/recorder/profile.h"
#include "budget/recorder/recording.h"
#include "budget/recorder/tape.h"
#include "budget/recorder/value_store.h"
#include "recompute/ambient.h"

namespace drivetrain::budget {

// Owns the tape and the objects that work on it, and locks it: backward runs on one thread per device. Forward runs on
// one thread.
//
// Backward asks for values. A missing one is replayed from its operation's inputs, which are replayed in turn where
// they are missing as well. Values and arguments are freed as soon as neither a saved tensor nor another pending
// operation needs them.
class RecordedPass : public std::enable_shared_from_this<RecordedPass> {
 public:
  // plan: null: none. compares_checksums: replays compare the values that they read with the forward pass's values.
  // This finds writes that no version counter shows, and reads every byte once more.
  RecordedPass(std::shared_ptr<Shared> shared, std::shared_ptr<TapePlan> plan, bool compares_checksums);
  ~RecordedPass() { store_.let_go_all(); }

  // The dispatcher's fallback and the saved-tensor hooks call these in the forward pass.
  Recording& recording() { return recording_; }
  std::shared_ptr<SavedTensor> save(const at::Tensor& tensor);
  // Calls Recording::preserve under the lock. Any pass may call it.
  void preserve(const at::Tensor& tensor);

  // Stops the recording: from now on autograd saves tensors as if there were no tape. Any thread may call it.
  void close() { is_closed_ = true; }
  bool is_closed() const { return is_closed_; }
  // Ends the forward pass, and frees the values that backward will not ask for.
  void end();
  // Frees everything, because no backward will run. A later use of the graph raises.
  void abandon();

  // Returns the tensor that autograd saved, replayed if needed. Called by the unpack hook in backward. Raises
  // CheckpointError after abandon(), or if a replay was interrupted while it wrote over a value.
  at::Tensor take(const SavedTensor& saved);
  void release(const SavedTensor& saved);
  bool is_in_use() const { return num_saved_ > 0; }

  Profile* profile() const { return profile_.get(); }  // null for a pass under a plan

 private:
  void count_users();
  bool is_needed(const RecordedOp& op) const;
  void drop_user(int32_t value);
  at::Tensor view_for_backward(const TensorRef& ref);
  void materialize(int32_t value);
  std::unordered_map<int32_t, at::Tensor> writable(const RecordedOp& op);
  void replay(int32_t op);

  Tape tape_;
  ValueStore store_;
  const std::unique_ptr<Profile> profile_;
  Recording recording_;
  const recompute::Switches switches_ = recompute::Switches::now();  // when the forward pass began
  std::recursive_mutex mutex_;
  std::atomic<bool> is_closed_ = false;
  int32_t num_saved_ = 0;
  bool has_counted_users_ = false;
  bool is_abandoned_ = false;
  bool is_interrupted_ = false;  // a replay failed after it had taken over the memory of a value
};

}  // namespace drivetrain::budget
