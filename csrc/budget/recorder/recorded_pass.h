// Declares RecordedPass: one forward pass from its recording to the end of its backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "budget/recorder/memory_tracker.h"
#include "budget/recorder/profile.h"
#include "budget/recorder/read_checks.h"
#include "budget/recorder/recording.h"
#include "budget/recorder/replay.h"
#include "budget/recorder/tape.h"
#include "budget/recorder/value_store.h"

namespace drivetrain::budget {

// Owns the tape and the objects that work on it, and locks it: backward runs on one thread per device. Forward runs on
// one thread.
class RecordedPass : public std::enable_shared_from_this<RecordedPass> {
 public:
  // unrepeatable: of a profile; null: the pass follows its plan, if it has one.
  // compares_checksums: replays compare the values that they read with the forward pass's values. This finds writes
  // that no version counter shows, and reads every byte once more.
  RecordedPass(std::shared_ptr<MemoryTracker> tracker, std::shared_ptr<TapePlan> plan,
               std::shared_ptr<const StorageFormats> formats, std::shared_ptr<KindsOfOps> unrepeatable,
               bool compares_checksums, WeakModule model);
  ~RecordedPass();

  // Returns the pass that the calling thread records; null: none.
  static RecordedPass*& current();

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
  // Frees everything, because no backward will run, even if the graph is still alive.
  void abandon();

  // Returns the tensor that autograd saved. Called by the unpack hook in backward.
  at::Tensor take(const SavedTensor& saved);
  void release(const SavedTensor& saved);
  bool is_in_use() const { return num_saved_ > 0; }

  Profile* profile() const { return profile_.get(); }  // null for a pass under a plan

 private:
  const std::shared_ptr<MemoryTracker> tracker_;
  Tape tape_;
  ValueStore store_;
  const ReadChecks checks_;
  Replay replay_;
  const std::unique_ptr<Profile> profile_;
  Recording recording_;
  std::recursive_mutex mutex_;
  std::atomic<bool> is_closed_ = false;
  int32_t num_saved_ = 0;
};

}  // namespace drivetrain::budget
