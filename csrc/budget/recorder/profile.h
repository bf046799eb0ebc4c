// Declares Profile and its three kinds, which measure a forward pass in the runs of a training step before planning.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "budget/recorder/device_timer.h"
#include "budget/recorder/memory_tracker.h"
#include "budget/recorder/read_checks.h"
#include "budget/recorder/replay.h"
#include "budget/recorder/tape.h"
#include "budget/recorder/value_store.h"

namespace drivetrain::budget {

// Reasons to record a pass.
enum class RecordingPurpose {
  kPlan,           // store and recompute values as a plan says
  kProfile,        // store everything, and re-execute each operation after the forward pass
  kFrugalProfile,  // re-execute in the same way, but store nothing; the step ends before backward
  kTimings,        // store everything, and time recomputation when backward asks for values
};

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
  std::optional<double> seconds;  // none: it was not re-executed
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

class Profile {
 public:
  // Returns null for RecordingPurpose::kPlan.
  static std::unique_ptr<Profile> make(RecordingPurpose purpose, Tape& tape, ValueStore& store, const Replay& replay,
                                       const ReadChecks& checks, std::shared_ptr<MemoryTracker> tracker);
  virtual ~Profile() = default;

  // Fills memory that an operation returned with arbitrary contents. The allocator may return memory of an earlier
  // step, whose stale contents would look like recomputed ones.
  static void fill_with_garbage(const at::Tensor& tensor);

  void note_save(AutogradSave save) { saves_.push_back(save); }
  // Returns whether to store a replayable value that autograd saves.
  virtual bool stores_saved(Value& value, const at::Tensor& tensor) { return true; }
  // Returns whether backward can run after this forward pass.
  virtual bool has_backward() const { return true; }

  // Takes the measurements that follow the forward pass.
  virtual void measure_after_forward() = 0;
  // Notes that backward takes a value, before it is provided.
  virtual void note_take(int32_t value);
  void note_release(int32_t value);

  int64_t begin() const { return begin_; }  // the order of the first use that could belong to the pass
  const std::vector<BackwardUse>& uses() const { return uses_; }
  const std::vector<AutogradSave>& saves() const { return saves_; }
  std::vector<ValueTrace> value_traces() const;
  std::vector<OpTrace> op_traces() const;

 protected:
  Profile(Tape& tape, ValueStore& store, const Replay& replay, const ReadChecks& checks,
          std::shared_ptr<MemoryTracker> tracker);

  // Calls an operation again and notes the time. `memory_of` provides each value that it reads, and `takes_over` says
  // whose memory it may write over. A value that autograd saved with other bits is marked as not recomputable. Returns
  // the results.
  std::vector<at::Tensor> reexecute(int32_t op, const std::function<const at::Tensor&(int32_t)>& memory_of,
                                    const std::function<bool(int32_t)>& takes_over);
  bool can_reexecute(const RecordedOp& op) const;
  // Measures bytes and time of each storage format for a value.
  void measure_formats(int32_t value, const at::Tensor& tensor);

  Tape& tape_;
  ValueStore& store_;
  const Replay& replay_;
  const ReadChecks& checks_;
  const std::shared_ptr<MemoryTracker> tracker_;

 private:
  bool has_saved_bits(const Value& value, const at::Tensor& tensor) const;

  const int64_t begin_;
  std::vector<BackwardUse> uses_;
  std::vector<AutogradSave> saves_;
  std::vector<std::pair<int32_t, DeviceTimer>> timers_;  // of re-executed operations
};

// Stores everything and re-executes each operation after the forward pass, to check that it is deterministic.
class ForwardProfile : public Profile {
 public:
  using Profile::Profile;
  void measure_after_forward() override;
};

// Stores only the values that cannot be replayed, and hashes of the rest, for a step that does not fit into memory
// otherwise.
class FrugalProfile : public ForwardProfile {
 public:
  using ForwardProfile::ForwardProfile;
  bool stores_saved(Value& value, const at::Tensor& tensor) override;
  bool has_backward() const override { return false; }
};

// Times recomputation where backward needs it: by then the inputs have left the caches.
class BackwardProfile : public Profile {
 public:
  using Profile::Profile;
  void measure_after_forward() override {}
  void note_take(int32_t value) override;

 private:
  std::vector<int32_t> ops_to_reexecute(int32_t value) const;
  void time_recomputation(int32_t value);

  std::vector<uint8_t> num_calls_;  // per operation
};

}  // namespace drivetrain::budget
