// Declares Tape: the data that recording a forward pass produces, which are its operations and the values they made.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "budget/recorder/device_timer.h"
#include "budget/recorder/memory_tracker.h"
#include "budget/recorder/op_traits.h"
#include "budget/recorder/tensor_ref.h"
#include "recompute/ambient.h"
#include "saved_tensors/host_pool.h"
#include "saved_tensors/offload.h"
#include "saved_tensors/pack.h"

namespace drivetrain::budget {

// Names how a value is stored from its last use in the forward pass until backward.
enum StorageFormat : int8_t {
  kUnplanned = -2,  // unchanged if autograd saves it, otherwise not at all
  kRecomputed = -1,
  kUnchanged = 0,
  kAsBits = 1,  // packed; see saved_tensors/pack.h
  kAsBFloat16 = 2,
  kAsInt8 = 3,
  kOnHost = 4,  // offloaded; see saved_tensors/offload.h
};
saved_tensors::Packing packing_of(int8_t format);

// Identifies a value by the operation of the pass that makes it and the index among that operation's results.
using PlannedWrite = std::pair<int32_t, int32_t>;

struct PlannedOp {
  std::string name;             // "aten::addmm"
  std::vector<int8_t> formats;  // StorageFormat per value that it writes
  bool is_replayed;             // backward calls it again, so its arguments must be recorded
  uint64_t arguments;           // as RecordedOp::arguments
  // Per value that it writes: the offloaded values whose copy back starts once backward has taken that value.
  std::vector<std::vector<PlannedWrite>> prefetches;
  std::string module;            // the name of the module that calls it, for error messages
  std::vector<int32_t> numbers;  // of the values that it writes, in the profiled pass
  int64_t most_bytes;            // that a pass on another path may keep up to this operation
};
struct TapePlan {
  std::vector<PlannedOp> ops;
  std::unordered_map<std::string, std::vector<int32_t>> by_name;  // the indices of operations
  std::vector<double> seconds;  // per operation, the time of its replays summed over all passes
  int64_t num_passes = 0;       // the number of passes recorded under this plan
};

// The state that all passes of a recorder share.
struct Shared {
  const bool is_profile;  // passes are measured, and follow no plan
  MemoryTracker tracker;
  std::vector<int8_t> tried_formats;              // that a profile measures
  std::shared_ptr<saved_tensors::HostPool> pool;  // holds the values of format kOnHost
  int64_t budget_bytes = INT64_MAX;               // prefetches start only while the live bytes stay below this limit
  // A Python weak reference to the module whose passes are recorded, for error messages; null: none.
  std::shared_ptr<const c10::SafePyObject> model;
  std::set<uint64_t> unrepeatable;  // the RecordedOp::kind of operations that do not repeat their results
};

// A number of a StorageFormat, the bytes of a value in it, and the seconds to convert the value there and back.
using FormatCost = std::tuple<int8_t, int64_t, double>;

// The contents of one storage at one time. An operation that writes in place makes a new value that replaces another.
struct Value {
  int32_t op;        // the operation that made it; -1: it was made by code that the recorder did not see
  int64_t bytes;     // the size of its storage
  uint32_t version;  // the version counter when it was made
  int8_t format = kUnplanned;
  bool can_recompute;  // calling its operation again yields the same bits
  bool is_replayable;  // can_recompute, and everything that its operation reads is stored or replayable
  bool is_uninitialized = false;
  bool is_overwritten = false;            // an operation wrote to its memory, so that another value replaced it
  bool is_recorded = false;               // the recorder saw how it was made
  bool has_independent_versions = false;  // its views count writes separately, so its version says nothing
  bool is_recomputed = false;             // `held` is not the memory of the forward pass
  bool is_read = false;                   // by an operation that is no view
  int32_t number = 0;                     // in the profiled pass; unique where that had no such value
  int32_t replaces = -1;
  int32_t num_saved = 0;
  int32_t num_users = 0;  // after the forward pass: the saved tensors and the pending operations that read it
  at::Tensor held;        // a view of it
  uint32_t held_version = 0;
  std::optional<saved_tensors::Packed> packed;
  std::optional<saved_tensors::Offloaded> offloaded;
  bool has_format_costs = false;
  std::vector<FormatCost> format_costs;                   // measured by a profile
  std::optional<uint64_t> hash;                           // of its bytes, in a profile
  int64_t held_bytes = 0;                                 // as the memory tracker counts them
  const std::vector<PlannedWrite>* prefetches = nullptr;  // points into the plan
};

// Locates a value that an operation wrote: a returned tensor, or an argument.
struct OpResult {
  int32_t value;
  bool is_argument;
  int32_t index, element;
};

struct RecordedOp {
  RecordedOp(const c10::OperatorHandle& handle, const OpTraits& traits, c10::DispatchKeySet keys, int32_t module);

  // Returns whether calling it again with the recorded arguments has the effect of the first call and no other.
  bool can_replay() const;
  // Returns whether a tensor that existed before the pass, and that it read, was written or freed since.
  bool has_changed_inputs() const;
  // Forgets the arguments, because it will not be called again.
  void forget_arguments();
  // Calls it again with the tensor that `tensor_of` returns for each reference, and measures the time if there is a
  // timer to set. Returns the tensors of its results, in the order of `writes`.
  std::vector<at::Tensor> call(const std::function<at::Tensor(const TensorRef&)>& tensor_of,
                               std::optional<DeviceTimer>* timer) const;

  const OpTraits* traits;
  c10::OperatorHandle handle;
  c10::DispatchKeySet keys;  // below autograd
  c10::impl::LocalDispatchKeySet local_keys;
  bool is_grad_enabled;
  std::vector<c10::IValue> args;  // `refs` has the tensors among them
  std::vector<TensorRef> refs;
  std::vector<int32_t> reads;  // values
  std::vector<OpResult> writes;
  std::shared_ptr<const recompute::Autocast> autocast;
  std::shared_ptr<const recompute::RandomStates> random_states;
  uint64_t arguments = 0;   // a hash of which values it was called with and which of them require a gradient
  uint64_t kind = 0;        // in a profile: equal for operations that do the same work
  int32_t module;           // an index that the recorder was given; -1: none
  int32_t planned = -1;     // the planned operation that it has matched; -1: none
  bool is_pending = false;  // backward may still ask for a value that only a replay of it provides
};

// The recorder's other classes work on this data: Recording writes it, Profile and RecordedPass read it.
struct Tape {
  // Returns " in 'blocks.0.mlp'", the module that calls an operation, or "" if the plan does not say.
  std::string module_of(int32_t op) const;

  const std::shared_ptr<Shared> shared;
  const std::shared_ptr<TapePlan> plan;  // null: none
  std::vector<Value> values;
  std::vector<RecordedOp> ops;
  std::vector<int32_t> op_of_planned;  // the last operation that has matched a planned one; -1: none. Empty: no plan.
};

class RecordedPass;

// A tensor that autograd saved in a recorded pass. It lives from the call of the pack hook until backward frees it.
struct SavedTensor {
  explicit SavedTensor(std::shared_ptr<RecordedPass> pass) : pass(std::move(pass)) {}
  ~SavedTensor();
  std::shared_ptr<RecordedPass> pass;
  TensorRef ref;
};

}  // namespace drivetrain::budget
