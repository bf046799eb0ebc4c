// What a forward pass computed, operation by operation, so that what autograd saved of it can be forgotten and computed
// again: a value is replayed from what its operation read, and that again, down to what is kept.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "budget/recorder/memory_tracker.h"
#include "budget/recorder/stopwatch.h"
#include "budget/recorder/tensor_ref.h"
#include "checkpoint/ambient.h"
#include "saved_tensors/host_pool.h"
#include "saved_tensors/offload.h"
#include "saved_tensors/pack.h"

namespace drivetrain::budget {

// Where the recorder sits: above autograd, and nobody else's.
constexpr auto kRecorderKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr c10::DispatchKeySet kBelowRecorder(c10::DispatchKeySet::FULL_AFTER, kRecorderKey);

// What happens to a value once the forward pass has no more use for it.
enum Form : int8_t {
  kUnplanned = -2,  // is kept if autograd saves it
  kForgotten = -1,
  kAsIs = 0,
  kAsBits = 1,  // see pack.h
  kAsBFloat16 = 2,
  kAsInt8 = 3,
  kOnHost = 4,  // see offload.h
};
saved_tensors::Packing packing_of(int8_t form);

// A value by where it is made: the operation's place in the pass, and which of its results.
using PlannedWrite = std::pair<int32_t, int32_t>;

struct PlannedOp {
  std::string name;           // "aten::addmm"
  std::vector<int8_t> forms;  // of what it writes, in order
  bool is_replayed;           // in backward: what it takes has to be known
  // With these arguments, all that autograd saves in it is kept as it is: the hooks need not see that.
  std::optional<uint64_t> unhooked_arguments;
  std::vector<bool> unhooked;  // of what it writes: whether such an operation saves it
  // Per value that it writes: the offloaded ones whose copy back starts once backward has taken that value.
  std::vector<std::vector<PlannedWrite>> prefetches;
  std::string module;  // that it is called in, for errors
};
struct TapePlan {
  std::vector<PlannedOp> ops;
  std::vector<double> seconds;  // that replaying each took, in all passes
  int64_t num_passes = 0;       // under this plan
};

// How values may be kept besides as they are, for all tapes of a recorder.
struct Forms {
  std::vector<int8_t> tried;                      // in a profile
  std::shared_ptr<saved_tensors::HostPool> pool;  // of kOnHost
  // Bytes that prefetching must not go beyond.
  int64_t budget_bytes = INT64_MAX;
};

// A weak reference of Python's to the module whose passes are recorded, for errors; null: none.
using WeakModule = std::shared_ptr<const c10::SafePyObject>;

// What the recorder knows of an operation from its schema, for every call of it.
struct OpTraits {
  explicit OpTraits(const c10::OperatorHandle& op);

  bool is_statistic(int32_t arg) const { return statistics >= 0 && (arg == statistics || arg == statistics + 1); }
  bool changes_arguments() const { return writes_any || tears || statistics >= 0; }

  std::string name;
  std::vector<bool> writes;  // per argument: whether its memory is written
  bool writes_any = false;
  bool is_composite;      // made of other operations
  bool is_uninitialised;  // gives memory that somebody else writes
  bool is_garbage;        // and whatever was there
  bool only_writes;       // what it writes does not depend on what was there
  bool has_workspace;     // among its results
  bool is_view;           // gives no memory of its own
  bool is_random;
  uint64_t identity;   // a hash of its name, overload included
  bool tears;          // gives views that each count their writes for themselves
  bool is_batch_norm;  // can be called again, without its running statistics
  int32_t statistics;  // the first of two arguments that are updated, though the schema does not say so; -1: none
  bool is_collective;  // of torch.distributed: may write all of its arguments
  bool is_never_replayed;
  std::atomic<bool> is_removed = false;  // from the dispatcher: handles of it are nobody's
};

enum class Purpose {
  kPlan,           // to keep what a plan says
  kProfile,        // to find out all that a plan takes, with everything kept
  kFrugalProfile,  // the same with nothing kept, so that there is no backward
  kTimings,        // what it takes to compute again what backward asks for, when it does
};

class Tape : public std::enable_shared_from_this<Tape> {
 public:
  // As seen from outside: for the solver and for tables.
  struct FormTrace {
    int8_t form;
    int64_t bytes;
    double seconds;  // there and back
  };
  struct ValueTrace {
    int64_t bytes;
    bool can_keep, can_forget;
    int32_t replaces;
    std::vector<FormTrace> forms;
  };
  struct OpTrace {
    std::string name;
    int32_t module;
    std::optional<double> seconds;  // none: it was not called again
    std::vector<int32_t> reads, writes;
    uint64_t arguments;
  };
  struct Use {  // by autograd
    int32_t value;
    bool is_release;
    int64_t order;  // among those of all tapes of a ledger
  };

  struct Save {  // by autograd
    int32_t op;  // before or in which it was
    int32_t value;
  };

  // is_checked: replays compare what they read with what forward's operations read, for writes that nobody counts.
  Tape(std::shared_ptr<Ledger> ledger, std::shared_ptr<TapePlan> plan, std::shared_ptr<const Forms> forms,
       Purpose purpose, bool is_checked = false, WeakModule model = nullptr);
  ~Tape();

  // The calling thread's, while its forward pass is recorded.
  static Tape*& current();

  // Runs an operation and writes down what it did; called by the dispatcher.
  void record(const c10::OperatorHandle& op, const OpTraits& traits, c10::DispatchKeySet keys,
              torch::jit::Stack* stack);

  // The forward pass is over: what nobody will ask for goes.
  void end();

  // There will be no backward: everything goes, whoever still has the graph.
  void abandon();

  // Computes the whole forward pass once more, operation by operation, each with the time it took; what comes out with
  // other bits than autograd saved is not to be forgotten. Of a tape of a profile, after end(). Of one of timings,
  // take() does the same for each value when backward asks for it, and what that reads has left the caches.
  void rehearse();

  // A saved tensor, from the hook that autograd gives it to until backward has no more use for it.
  struct Saved {
    explicit Saved(std::shared_ptr<Tape> tape) : tape(std::move(tape)) {}
    ~Saved();
    std::shared_ptr<Tape> tape;  // null once it has been given back
    TensorRef ref;
  };
  std::shared_ptr<Saved> save(const at::Tensor& tensor);
  at::Tensor take(const Saved& saved);

  int32_t module() const { return module_; }
  void set_module(int32_t module) { module_ = module; }

  // Nothing more is recorded, and what autograd saves from now on it has as without a tape: of a pass that has ended.
  void close() { is_closed_ = true; }
  bool is_closed() const { return is_closed_; }
  // Where the pass left the plan: "operation 12 is aten::mul, the plan has aten::add"; empty: nowhere.
  const std::string& divergence() const { return divergence_; }
  bool is_in_use() const { return num_saved_ > 0; }
  bool is_frugal() const { return is_frugal_; }
  const std::vector<Use>& uses() const { return uses_; }
  const std::vector<Save>& saves() const { return saves_; }
  int64_t begin() const { return begin_; }  // in the order of uses
  std::vector<ValueTrace> value_traces() const;
  std::vector<OpTrace> op_traces() const;

 private:
  struct Value {
    int32_t op;  // that wrote it; -1: none that we saw
    int64_t bytes;
    uint32_t version;
    int8_t form = kUnplanned;
    bool can_forget;     // its operation can be replayed
    bool is_replayable;  // and all that it takes is there, now and later
    bool is_uninitialised = false;
    bool is_overwritten = false;
    bool is_seen = false;      // how it was made
    bool is_torn = false;      // see tear()
    bool is_remade = false;    // what is held is not forward's memory
    bool is_unhooked = false;  // autograd keeps it without our hooks, and the ledger looks whether it still does
    int32_t replaces = -1;
    int32_t num_saved = 0;
    int32_t num_users = 0;  // since end(): saved tensors, and operations to be replayed that read it
    at::Tensor held;        // a view of it
    uint32_t held_version = 0;
    std::optional<saved_tensors::Packed> packed;
    std::optional<saved_tensors::Offloaded> offloaded;
    std::vector<FormTrace> forms;                           // of a profile
    std::optional<uint64_t> hash;                           // of a frugal one, of what was saved
    int64_t held_bytes = 0;                                 // as counted
    const std::vector<PlannedWrite>* prefetches = nullptr;  // of the plan
  };
  struct Slot {  // where an operation's result is
    int32_t value;
    bool is_argument;
    int32_t index, element;
  };
  struct Op {
    Op(const c10::OperatorHandle& handle, const OpTraits& traits, c10::DispatchKeySet keys, int32_t module);

    const OpTraits* traits;
    c10::OperatorHandle handle;
    c10::DispatchKeySet keys;  // below autograd
    c10::impl::LocalDispatchKeySet local_keys;
    bool is_grad_enabled;
    std::vector<c10::IValue> args;  // without the tensors of refs
    std::vector<TensorRef> refs;
    std::vector<int32_t> reads;
    std::vector<Slot> writes;
    std::shared_ptr<const checkpoint::Autocast> autocast;
    std::shared_ptr<const checkpoint::RandomStates> random_states;
    uint64_t arguments = 0;   // see arguments_
    int32_t module;           // as set_module() said
    bool is_pending = false;  // a value that it wrote may be asked for
  };
  struct Unresolved {
    std::weak_ptr<Saved> saved;
    at::Tensor tensor;
    std::optional<uint32_t> version;  // that was saved, of an argument
  };
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that nobody gets its address
    int32_t value;
  };

  int32_t add_value(const at::Tensor& tensor, int32_t op, bool can_forget);
  // The value that the tensor shows; -1: one that was there before the pass. `is_foreign`: made by nobody we saw.
  int32_t value_of(const at::Tensor& tensor, bool is_foreign);
  int32_t value_of_argument(const at::Tensor& tensor);
  void protect(int32_t value);
  void tear(int32_t value);
  void make_opaque(int32_t value, const at::Tensor& tensor);
  void write_unseen(int32_t value, const at::Tensor& tensor);
  void keep_arguments(Op& op, const torch::jit::Stack& stack, bool may_be_replayed);
  c10::IValue keep_argument(Op& op, int32_t arg, const c10::IValue& argument, bool is_written);
  void keep_tensor(Op& op, int32_t arg, int32_t element, const at::Tensor& tensor, bool is_written);
  void note_results(Op op, bool can_forget, torch::jit::Stack* stack);
  void count_unhooked(int32_t value, const at::Tensor& tensor);
  void preserve(const at::Tensor& tensor);
  void note_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, bool is_unhooked);
  const PlannedOp* planned_next(const OpTraits& traits) const;
  void plan_values(int32_t op);
  void note_checksums(Op& op, const torch::jit::Stack& stack) const;
  void check_checksums(const Op& op) const;
  std::string name_of(const Op& op, const TensorRef& ref) const;
  std::string place_of(int32_t op) const;
  bool can_replay(const Op& op) const;
  void resolve(Saved& saved, const at::Tensor& tensor);

  bool is_there(int32_t value) const;
  void keep(int32_t value, const at::Tensor& tensor);  // in its form
  void hold(int32_t value, const at::Tensor& tensor);
  void bring_back(int32_t value);
  void order_writes_after_copies_out();
  void prefetch(int32_t value);
  void prefetch_planned_at(int32_t value);
  void prefetch_before(int32_t value);
  std::vector<at::Tensor> rehearse_op(int32_t op, const std::function<const at::Tensor&(int32_t)>& memory_of,
                                      const std::function<bool(int32_t)>& takes_over);
  void rehearse_value(int32_t value);
  std::vector<int32_t> ops_to_rehearse(int32_t value) const;
  bool can_rehearse(const Op& op) const;
  static uint64_t kind_of(const Op& op);
  bool has_same_bits(const Value& value, const at::Tensor& tensor) const;
  void try_forms(int32_t value, const at::Tensor& tensor);
  void let_go(int32_t value);
  bool is_asked_for(const Op& op) const;
  void forget_arguments(Op& op) const;
  void drop_user(int32_t value);
  void check_usable() const;
  void materialise(int32_t value);
  void replay(int32_t op);
  // Calls the operation with the given memory for each value that it reads; gives what is in its slots.
  std::vector<at::Tensor> call(Op& op, const std::function<at::Tensor(const TensorRef&)>& tensor_of);
  static std::unordered_map<int32_t, at::Tensor> writable(const Op& op,
                                                          const std::function<at::Tensor(int32_t)>& memory_of);
  at::Tensor checked(const TensorRef& ref) const;
  void check_unwritten(const TensorRef& ref) const;
  void release(const Saved& saved);

  const std::shared_ptr<Ledger> ledger_;
  const std::shared_ptr<TapePlan> plan_;
  const std::shared_ptr<const Forms> forms_;
  const bool is_profile_, is_frugal_, is_timed_in_backward_, is_checked_;
  const WeakModule model_;
  const int64_t begin_;
  std::recursive_mutex mutex_;  // backward runs on a thread for each device; see Locked
  std::vector<Value> values_;
  std::vector<Op> ops_;
  ska::flat_hash_map<const c10::StorageImpl*, Known> known_;
  bool is_running_ = false;             // an operation
  std::vector<at::Tensor> written_;     // by it: in the order of those references whose argument is written
  std::vector<Unresolved> unresolved_;  // saved by it
  std::atomic<bool> is_closed_ = false;
  bool has_ended_ = false;
  bool is_abandoned_ = false;
  bool is_broken_ = false;  // an operation was interrupted when it was called again
  int32_t num_saved_ = 0;
  int32_t module_ = -1;
  std::shared_ptr<const checkpoint::Autocast> autocast_;
  std::pair<c10::DispatchKeySet, c10::DispatchKeySet> autocast_keys_;  // which autocast_ belongs to
  std::string divergence_;
  std::vector<int32_t> offloaded_;  // in order of forward
  std::vector<Use> uses_;           // of a profile
  uint64_t arguments_ = 0;  // a hash of what autograd goes by: which values it is called with, which require a gradient
  int32_t saving_op_ = 0;
  std::vector<Save> saves_;
  std::vector<std::pair<int32_t, Stopwatch>> watches_;  // of operations, called again
  std::vector<uint8_t> num_rehearsed_;                  // in backward
  const size_t num_hooks_;                              // with this tape's, which come next
};

}  // namespace drivetrain::budget
