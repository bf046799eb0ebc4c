// Writing down what a forward pass does, and computing it again; see tape.h.
#include "budget/recorder/tape.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/hash.h"
#include "base/torch_text.h"
#include "budget/recorder/stopwatch.h"
#include "checkpoint/region.h"

namespace drivetrain::budget {
namespace {

// Has been computed, and is no view of a parameter.
bool is_computed(const at::Tensor& tensor) { return (tensor.is_view() ? tensor._base() : tensor).grad_fn() != nullptr; }

bool is_defined(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

template <class Function>
void for_each_tensor(const c10::IValue& value, const Function& function) {
  if (is_defined(value)) {
    function(value.toTensor(), -1);
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    const auto list = value.toListRef();
    for (size_t i = 0; i < list.size(); ++i) {
      if (is_defined(list[i])) function(list[i].toTensor(), static_cast<int32_t>(i));
    }
  }
}

// That an operation with these arguments runs on; none: not known from them.
std::optional<c10::Device> device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  bool is_one = true;
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice()) return std::nullopt;
    for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t) {
      is_one = is_one && (!device || *device == tensor.device());
      device = tensor.device();
    });
  }
  return is_one ? device : std::nullopt;
}

at::Tensor tensor_in(const c10::IValue& value, int32_t element) {
  return element < 0 ? value.toTensor() : value.toListRef()[element].toTensor();
}

size_t num_hooks() { return at::SavedTensorDefaultHooks::get_tls_state().stack.size(); }

// As long as this object lives, autograd saves without asking the hooks.
class NoHooks {
 public:
  NoHooks() : before_(at::SavedTensorDefaultHooks::set_tracing(true)) {}
  ~NoHooks() { at::SavedTensorDefaultHooks::set_tracing(before_); }
  NoHooks(const NoHooks&) = delete;
  NoHooks& operator=(const NoHooks&) = delete;

 private:
  const bool before_;
};

// What runs below autograd, in the state that the recorded call found.
class Below {
 public:
  Below(const c10::impl::LocalDispatchKeySet& keys, bool is_grad_enabled)
      : keys_(without_autograd(keys)), grad_mode_(is_grad_enabled) {}

 private:
  static c10::impl::LocalDispatchKeySet without_autograd(c10::impl::LocalDispatchKeySet keys) {
    keys.included_ = (keys.included_ - kPythonKeys).remove(kRecorderKey);
    keys.excluded_ = keys.excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    return keys;
  }

  const c10::impl::ForceDispatchKeyGuard keys_;
  const at::AutoGradMode grad_mode_;
};

// Holds a mutex; whoever has the GIL does not wait for it with that.
class Locked {
 public:
  explicit Locked(std::recursive_mutex& mutex) : lock_(mutex, std::try_to_lock) {
    if (lock_.owns_lock()) return;
    std::optional<pybind11::gil_scoped_release> no_gil;
    if (PyGILState_Check() != 0) no_gil.emplace();
    lock_.lock();
  }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

}  // namespace

saved_tensors::Packing packing_of(int8_t form) {
  return form == kAsBits       ? saved_tensors::Packing::kBits
         : form == kAsBFloat16 ? saved_tensors::Packing::kBFloat16
                               : saved_tensors::Packing::kInt8;
}

Tape::Op::Op(const c10::OperatorHandle& handle, const OpTraits& traits, c10::DispatchKeySet keys, int32_t module)
    : traits(&traits),
      handle(handle),
      keys((keys & c10::after_ADInplaceOrView_keyset) - kPythonKeys),
      local_keys(c10::impl::tls_local_dispatch_key_set()),
      is_grad_enabled(c10::GradMode::is_enabled()),
      module(module) {}

Tape*& Tape::current() {
  static thread_local Tape* tape = nullptr;
  return tape;
}

Tape::Tape(std::shared_ptr<Ledger> ledger, std::shared_ptr<TapePlan> plan, std::shared_ptr<const Forms> forms,
           Purpose purpose, bool is_checked, WeakModule model)
    : ledger_(std::move(ledger)),
      plan_(std::move(plan)),
      forms_(std::move(forms)),
      is_profile_(purpose != Purpose::kPlan),
      is_frugal_(purpose == Purpose::kFrugalProfile),
      is_timed_in_backward_(purpose == Purpose::kTimings),
      is_checked_(is_checked),
      model_(std::move(model)),
      begin_(ledger_->num_uses()),
      num_hooks_(num_hooks() + 1) {
  if (!plan_) return;
  size_t num_values = 0;
  for (const PlannedOp& op : plan_->ops) num_values += op.forms.size();
  values_.reserve(num_values);
  ops_.reserve(plan_->ops.size());
  known_.reserve(num_values);
}

Tape::~Tape() {
  for (size_t value = 0; value < values_.size(); ++value) let_go(static_cast<int32_t>(value));
  ledger_->close(this);
}

Tape::Saved::~Saved() {
  if (tape) tape->release(*this);
}

// ---- The forward pass

int32_t Tape::add_value(const at::Tensor& tensor, int32_t op, bool can_forget) {
  const auto value = static_cast<int32_t>(values_.size());
  Value& made = values_.emplace_back();
  made.op = op;
  made.bytes = static_cast<int64_t>(tensor.storage().nbytes());
  made.version = tensor._version();
  made.can_forget = made.is_replayable = can_forget;
  made.is_seen = op >= 0;
  known_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), Known{tensor.storage().getWeakStorageImpl(), value});
  return value;
}

int32_t Tape::value_of(const at::Tensor& tensor, bool is_foreign) {
  const auto found = known_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == known_.end()) {
    if (is_foreign) {
      const int32_t value = add_value(tensor, -1, false);
      if (is_profile_) hold(value, tensor);
      return value;
    }
    known_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), Known{tensor.storage().getWeakStorageImpl(), -1});
    return -1;
  }
  const int32_t value = found->second.value;
  if (value < 0 || values_[value].is_torn || values_[value].version == tensor._version()) return value;
  write_unseen(value, tensor);
  return known_.at(tensor.storage().unsafeGetStorageImpl()).value;
}

int32_t Tape::value_of_argument(const at::Tensor& tensor) {
  const int32_t value = value_of(tensor, is_computed(tensor));
  arguments_ = mix(arguments_, static_cast<uint64_t>(value) << 1 | static_cast<uint64_t>(tensor.requires_grad()));
  return value;
}

// Somebody we did not see has written, or may have: what is there now is another value.
void Tape::write_unseen(int32_t before, const at::Tensor& tensor) {
  protect(before);
  const int32_t value = add_value(tensor, -1, false);
  values_[value].replaces = before;
  values_[before].is_overwritten = true;
  if (is_profile_) hold(value, tensor);
}

// Its memory is about to be written over.
void Tape::protect(int32_t index) {
  Value& value = values_[index];
  if (value.offloaded) bring_back(index);  // its copy reads this memory
  if (!value.held.defined() || value.is_overwritten || value.is_torn) return;
  if (value.is_replayable && !is_profile_) {
    let_go(index);
    return;
  }
  // Nobody can bring it back, or it is not known yet whether somebody can.
  if (value.held._version() != value.held_version) return;  // too late: take() says so
  value.held = copy_of(value.held);
  value.held_version = value.held._version();
}

// Its views count writes each for itself: what is read of it later may be of any version.
void Tape::tear(int32_t index) {
  protect(index);
  values_[index].is_torn = true;
}

void Tape::make_opaque(int32_t value, const at::Tensor& tensor) {
  Value& made = values_[value];
  made.can_forget = made.is_replayable = made.is_uninitialised = made.is_seen = false;
  if (is_profile_) hold(value, tensor);
}

void Tape::keep_tensor(Op& op, int32_t arg, int32_t element, const at::Tensor& tensor, bool is_written) {
  TensorRef& ref = op.refs.emplace_back();
  ref.arg = arg;
  ref.element = element;
  ref.value = -1;
  if (!is_plain(tensor)) return;
  ref.value = value_of_argument(tensor);
  describe(tensor, ref);
  if (ref.value < 0) {
    ref.direct = alias_of(tensor);
    return;
  }
  const bool is_base = is_written && op.traits->only_writes && covers_its_storage(tensor);
  if (values_[ref.value].is_uninitialised && !is_base) make_opaque(ref.value, tensor);
  if (std::find(op.reads.begin(), op.reads.end(), ref.value) == op.reads.end()) op.reads.push_back(ref.value);
}

c10::IValue Tape::keep_argument(Op& op, int32_t arg, const c10::IValue& argument, bool is_written) {
  bool has_tensors = false;
  for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t element) {
    keep_tensor(op, arg, element, tensor, is_written);
    has_tensors = true;
  });
  if (!has_tensors) return argument;
  if (argument.isTensor()) return {};
  const c10::impl::GenericList list = argument.toList();
  c10::impl::GenericList kept(list.elementType());
  for (const c10::IValue& element : argument.toListRef()) kept.push_back(is_defined(element) ? c10::IValue() : element);
  return kept;
}

// Which tensors were there before the pass.
void Tape::note_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t num_args = op.schema().arguments().size();
  for (size_t i = stack.size() - num_args; i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](const at::Tensor& tensor, int32_t) {
      if (is_plain(tensor)) value_of_argument(tensor);
    });
  }
}

// What was there before the pass is about to be written: operations that have read it read a copy when they are
// replayed.
void Tape::preserve(const at::Tensor& tensor) {
  const Locked lock(mutex_);
  at::Tensor copy;
  for (Op& op : ops_) {
    for (TensorRef& ref : op.refs) {
      if (ref.value >= 0 || !ref.direct.defined() || op.traits->writes[ref.arg] ||
          ref.direct.storage().unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl() || is_written(ref)) {
        continue;
      }
      if (!copy.defined()) copy = copy_of(tensor);
      ref.direct = view_of(copy, ref);
      ref.version = ref.direct._version();
    }
  }
}

// What the plan has for the operation that begins; null: nothing, or another one.
const PlannedOp* Tape::planned_next(const OpTraits& traits) const {
  if (!plan_ || !divergence_.empty() || ops_.size() >= plan_->ops.size()) return nullptr;
  const PlannedOp& planned = plan_->ops[ops_.size()];
  return planned.name == traits.name ? &planned : nullptr;
}

void Tape::run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, bool is_unhooked) {
  struct Running {
    explicit Running(Tape& tape) : tape(tape) { tape.is_running_ = true; }
    ~Running() { tape.is_running_ = false; }
    Tape& tape;
  } const running(*this);
  std::optional<NoHooks> no_hooks;
  if (is_unhooked) no_hooks.emplace();
  try {
    op.redispatchBoxed(keys & kBelowRecorder, stack);
  } catch (...) {
    unresolved_.clear();
    throw;
  }
}

// What it reads and writes, and all that calling it again takes where that may be.
void Tape::keep_arguments(Op& op, const torch::jit::Stack& stack, bool may_be_replayed) {
  const OpTraits& traits = *op.traits;
  const size_t num_args = op.handle.schema().arguments().size();
  op.args.reserve(num_args);
  for (size_t i = 0; i < num_args; ++i) {
    const c10::IValue& argument = stack[stack.size() - num_args + i];
    op.args.push_back(keep_argument(op, static_cast<int32_t>(i), argument, traits.writes[i]));
    if (!traits.writes[i]) continue;
    for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t) { written_.push_back(tensor); });
  }
  for (const TensorRef& ref : op.refs) {
    if (!traits.writes[ref.arg] && !traits.is_statistic(ref.arg)) continue;
    if (ref.value >= 0) {
      if (traits.writes[ref.arg]) protect(ref.value);
    } else if (ref.direct.defined()) {
      for (const auto& tape : ledger_->tapes()) tape->preserve(ref.direct);
    }
  }
  if (!may_be_replayed) return;
  if (traits.is_batch_norm && op.args[5].toBool()) {
    std::erase_if(op.refs, [&](const TensorRef& ref) { return ref.value < 0 && traits.is_statistic(ref.arg); });
  }
  if (traits.is_random) {
    const std::optional<c10::Device> device = device_of(torch::jit::last(stack, num_args));
    op.random_states = std::make_shared<const checkpoint::RandomStates>(
        device ? checkpoint::RandomStates::now_of(*device) : checkpoint::RandomStates::now());
  }
  const std::pair keys_now(op.local_keys.included_, op.local_keys.excluded_);  // autocast is switched by those
  if (!autocast_ || autocast_keys_ != keys_now) {
    autocast_ = std::make_shared<const checkpoint::Autocast>(checkpoint::Autocast::now());
    autocast_keys_ = keys_now;
  }
  op.autocast = autocast_;
}

void Tape::record(const c10::OperatorHandle& handle, const OpTraits& traits, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  written_.clear();
  saving_op_ = static_cast<int32_t>(ops_.size());
  arguments_ = mix(traits.identity, static_cast<uint64_t>(c10::GradMode::is_enabled()));
  Op op(handle, traits, keys, module_);
  const PlannedOp* planned = planned_next(traits);
  const bool may_be_replayed = !traits.is_view && (planned == nullptr || planned->is_replayed);
  if (may_be_replayed || traits.changes_arguments()) {
    keep_arguments(op, *stack, may_be_replayed);
    if (is_checked_ && planned != nullptr && planned->is_replayed) note_checksums(op, *stack);
  } else {
    note_arguments(handle, *stack);
  }
  std::vector<at::Tensor> communicated;  // written, whatever the schema says
  if (traits.is_collective) {
    for (const c10::IValue& argument : torch::jit::last(*stack, handle.schema().arguments().size())) {
      for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t) { communicated.push_back(tensor); });
    }
  }
  op.arguments = arguments_;
  const bool is_unhooked = planned != nullptr && planned->unhooked_arguments == arguments_ &&
                           num_hooks() == num_hooks_;  // those of somebody inside this pass are to be asked
  run(handle, keys, stack, is_unhooked);
  for (const at::Tensor& tensor : communicated) {
    const int32_t value = is_plain(tensor) ? value_of(tensor, false) : -1;
    if (value >= 0) write_unseen(value, tensor);
  }
  if (traits.is_view && unresolved_.empty()) return;
  const bool can_forget = may_be_replayed && can_replay(op);
  note_results(std::move(op), can_forget, stack);
  for (const Unresolved& unresolved : std::exchange(unresolved_, {})) {
    const auto saved = unresolved.saved.lock();
    if (!saved) continue;
    if (!unresolved.version || *unresolved.version == unresolved.tensor._version()) {
      resolve(*saved, unresolved.tensor);
      continue;
    }
    describe(unresolved.tensor, saved->ref);  // what was saved is not there any more: take() says so
    saved->ref.version = *unresolved.version;
    saved->ref.direct = unresolved.tensor;
  }
  written_.clear();
}

// Of what replaying it will read in memory that others may have, too.
void Tape::note_checksums(Op& op, const torch::jit::Stack& stack) const {
  const size_t begin = stack.size() - op.handle.schema().arguments().size();
  for (TensorRef& ref : op.refs) {
    if (op.traits->writes[ref.arg] && op.traits->only_writes) continue;
    if (ref.value < 0 && !ref.direct.defined()) continue;
    if (ref.value >= 0) {
      const Value& value = values_[ref.value];
      const bool is_remade = value.form >= kAsBits || (value.form == kForgotten && value.is_replayable);
      if (is_remade || value.is_torn || value.is_uninitialised) continue;
    }
    ref.checksum = hash_of_elements(tensor_in(stack[begin + ref.arg], ref.element));
  }
}

bool Tape::can_replay(const Op& op) const {
  for (const TensorRef& ref : op.refs) {
    if (ref.value >= 0) {
      if (op.traits->is_statistic(ref.arg)) return false;  // made in this pass: would be updated again
      continue;
    }
    if (!ref.direct.defined()) return false;       // not plain
    if (op.traits->writes[ref.arg]) return false;  // was there before, and is not as it was
  }
  if (op.traits->is_never_replayed) return false;
  return std::none_of(op.args.begin(), op.args.end(), [](const c10::IValue& arg) { return arg.isGenerator(); });
}

void Tape::note_results(Op op, bool can_forget, torch::jit::Stack* stack) {
  const auto index = static_cast<int32_t>(ops_.size());
  std::vector<at::Tensor> made;  // for each slot
  size_t next_written = 0;
  for (const TensorRef& ref : op.refs) {
    if (!op.traits->writes[ref.arg]) continue;
    const at::Tensor& tensor = written_[next_written++];
    if (ref.value < 0 || !is_plain(tensor)) continue;
    const bool is_twice = std::any_of(op.writes.begin(), op.writes.end(),
                                      [&](const Slot& slot) { return values_[slot.value].replaces == ref.value; });
    if (is_twice) continue;
    const int32_t value = add_value(tensor, index, can_forget);
    values_[value].replaces = ref.value;
    op.writes.push_back({value, true, ref.arg, ref.element});
    made.push_back(tensor);
  }
  const size_t num_returns = op.handle.schema().returns().size();
  for (size_t i = 0; i < num_returns; ++i) {
    for_each_tensor((*stack)[stack->size() - num_returns + i], [&](const at::Tensor& tensor, int32_t element) {
      if (!is_plain(tensor)) return;
      if (known_.count(tensor.storage().unsafeGetStorageImpl()) != 0) return;  // a view
      const int32_t value = add_value(tensor, index, can_forget);
      values_[value].is_uninitialised = op.traits->is_uninitialised;
      op.writes.push_back({value, false, static_cast<int32_t>(i), element});
      made.push_back(tensor);
    });
  }
  if (op.traits->tears) {
    for (const int32_t read : op.reads) tear(read);
  }
  if (op.writes.empty()) return;
  bool has_all = can_forget;
  for (const int32_t read : op.reads) {
    has_all = has_all && !values_[read].is_torn && (values_[read].is_replayable || is_there(read));
  }
  for (const Slot& slot : op.writes) {
    Value& value = values_[slot.value];
    value.is_replayable = has_all;
    if (value.replaces < 0) continue;
    values_[value.replaces].is_overwritten = true;
    if (values_[value.replaces].is_torn) {
      value.can_forget = value.is_replayable = value.is_seen = false;
      value.is_torn = true;
    }
  }
  if (!can_forget) forget_arguments(op);
  ops_.push_back(std::move(op));
  plan_values(index);
  for (size_t i = 0; i < made.size(); ++i) {
    const int32_t which = ops_[index].writes[i].value;
    const Value& value = values_[which];
    const bool may_be_needed = is_profile_ && !value.is_replayable && !value.is_uninitialised && !value.is_torn;
    if (value.form >= kAsIs || may_be_needed) keep(which, made[i]);
    if (value.is_unhooked) count_unhooked(which, made[i]);
  }
}

void Tape::count_unhooked(int32_t index, const at::Tensor& tensor) {
  Value& value = values_[index];
  ledger_->add(-std::exchange(value.held_bytes, 0));
  ledger_->add_unhooked(this, tensor.storage().getWeakStorageImpl(), value.bytes);
}

void Tape::plan_values(int32_t index) {
  if (!plan_ || !divergence_.empty()) return;
  const Op& op = ops_[index];
  if (static_cast<size_t>(index) >= plan_->ops.size()) {
    divergence_ = text("operation ", index + 1, " is ", op.traits->name, ", the plan ends before it");
    return;
  }
  const PlannedOp& planned = plan_->ops[index];
  if (planned.name != op.traits->name || planned.forms.size() != op.writes.size()) {
    divergence_ = text("operation ", index + 1, " is ", op.traits->name, ", the plan has ", planned.name);
    return;
  }
  for (size_t i = 0; i < op.writes.size(); ++i) {
    Value& value = values_[op.writes[i].value];
    value.form = planned.forms[i];
    value.is_unhooked = planned.unhooked[i];
    if (i < planned.prefetches.size()) value.prefetches = &planned.prefetches[i];
  }
}

std::shared_ptr<Tape::Saved> Tape::save(const at::Tensor& tensor) {
  auto saved = std::make_shared<Saved>(shared_from_this());
  ++num_saved_;
  saved->ref.value = -1;
  if (!is_plain(tensor)) {
    saved->ref.direct = tensor.detach();
    return saved;
  }
  if (is_closed_) {
    describe(tensor, saved->ref);
    saved->ref.direct = alias_of(tensor);
    return saved;
  }
  if (is_running_) {
    // It may be a result, which is not known yet, or an argument that is about to be one: rrelu_with_noise's noise is
    // saved before it is drawn.
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    const auto found = known_.find(storage);
    const bool is_known =
        found != known_.end() && (found->second.value < 0 || values_[found->second.value].version == tensor._version());
    const bool is_written = std::any_of(written_.begin(), written_.end(), [&](const at::Tensor& written) {
      return is_plain(written) && written.storage().unsafeGetStorageImpl() == storage;
    });
    if (!is_known || is_written) {
      unresolved_.push_back({saved, alias_of(tensor), is_known ? std::optional(tensor._version()) : std::nullopt});
      return saved;
    }
  }
  resolve(*saved, tensor);
  return saved;
}

void Tape::resolve(Saved& saved, const at::Tensor& tensor) {
  const bool is_parameter = tensor.is_leaf() && tensor.requires_grad();
  describe(tensor, saved.ref);
  saved.ref.value = value_of(tensor, !is_parameter);
  if (is_profile_) saves_.push_back({saving_op_, saved.ref.value});
  if (saved.ref.value < 0) {
    saved.ref.direct = alias_of(tensor);
    return;
  }
  Value& value = values_[saved.ref.value];
  ++value.num_saved;
  if (value.is_uninitialised) make_opaque(saved.ref.value, tensor);
  if (value.is_replayable) {
    if (is_frugal_) value.hash = hash_of_storage(tensor);
    if (is_frugal_ || (value.form == kForgotten && !is_profile_)) return;
  }
  keep(saved.ref.value, tensor);
}

void Tape::end() {
  is_closed_ = true;
  written_.clear();  // an operation that failed leaves them
  order_writes_after_copies_out();
  known_.clear();
  has_ended_ = true;
  for (Value& value : values_) value.num_users = value.num_saved;
  for (size_t i = ops_.size(); i-- > 0;) {
    Op& op = ops_[i];
    op.is_pending = is_asked_for(op);
    if (op.is_pending) {
      for (const int32_t read : op.reads) ++values_[read].num_users;
    } else {
      forget_arguments(op);
    }
  }
  if (is_profile_) return;  // rehearse() is still to come
  for (size_t value = 0; value < values_.size(); ++value) {
    if (values_[value].num_users == 0) let_go(static_cast<int32_t>(value));
  }
}

// Inside the pass, protect() knows of writes. Afterwards nobody tells us of them, so what is still alive (a result of
// the model, say) may only be written once its copy to the host has been made.
void Tape::order_writes_after_copies_out() {
  for (const auto& [_, known] : known_) {
    if (known.value < 0 || known.storage.expired()) continue;
    const std::optional<saved_tensors::Offloaded>& offloaded = values_[known.value].offloaded;
    if (offloaded) offloaded->await_copy_out();
  }
}

void Tape::abandon() {
  const Locked lock(mutex_);
  is_abandoned_ = true;
  for (size_t value = 0; value < values_.size(); ++value) let_go(static_cast<int32_t>(value));
}

// ---- Backward

bool Tape::is_there(int32_t index) const {
  const Value& value = values_[index];
  return value.held.defined() || value.packed || value.offloaded;
}

void Tape::keep(int32_t index, const at::Tensor& tensor) {
  Value& value = values_[index];
  if (is_there(index)) return;
  // What somebody writes unseen may not be there yet.
  const bool is_whole =
      value.bytes % static_cast<int64_t>(tensor.itemsize()) == 0 && value.is_seen && !value.is_uninitialised;
  if (value.form == kOnHost && forms_->pool && is_whole) {
    value.offloaded.emplace(saved_tensors::Offloaded::begin(forms_->pool, bytes_of(tensor)));
    value.held_bytes = 0;
    offloaded_.push_back(index);
    return;
  }
  if (value.form >= kAsBits && value.form <= kAsInt8 && is_whole) {
    const saved_tensors::Packing packing = packing_of(value.form);
    if (saved_tensors::is_packable(tensor.scalar_type(), packing))
      value.packed = saved_tensors::pack(flat_of(tensor, tensor.dtype()), packing);
    if (value.packed) {
      value.held_bytes = value.packed->nbytes();
      ledger_->add(value.held_bytes);
      return;
    }
  }
  hold(index, tensor);
}

void Tape::hold(int32_t index, const at::Tensor& tensor) {
  Value& value = values_[index];
  if (value.held.defined()) return;
  value.held = alias_of(tensor);
  value.held_version = tensor._version();
  value.held_bytes = value.is_unhooked ? 0 : value.bytes;
  ledger_->add(value.held_bytes);
}

void Tape::let_go(int32_t index) {
  Value& value = values_[index];
  if (!is_there(index)) return;
  value.held.reset();
  value.packed.reset();
  value.offloaded.reset();
  ledger_->add(-value.held_bytes);
  value.held_bytes = 0;
}

// As it is, from the form that it is kept in.
void Tape::bring_back(int32_t index) {
  Value& value = values_[index];
  const int64_t form_bytes = value.held_bytes;
  value.is_remade = value.is_remade || value.packed || value.offloaded;
  if (value.packed) {
    hold(index, saved_tensors::unpack(*value.packed));
    value.packed.reset();
    ledger_->add(-form_bytes);
  } else if (value.offloaded) {
    ledger_->add(-form_bytes);  // prefetched: counted already
    hold(index, value.offloaded->take());
    value.offloaded.reset();
  }
}

// Backward goes the other way than forward: what was offloaded before this value is asked for next.
void Tape::prefetch_before(int32_t index) {
  while (!offloaded_.empty() && offloaded_.back() >= index) offloaded_.pop_back();
  if (offloaded_.empty()) return;
  prefetch(offloaded_.back());
}

// The plan starts copies back so early that they end before backward needs them, as far as the budget has room.
void Tape::prefetch_planned_at(int32_t index) {
  if (values_[index].prefetches == nullptr) return;
  for (const auto& [op, write] : *values_[index].prefetches) {
    if (static_cast<size_t>(op) < ops_.size() && static_cast<size_t>(write) < ops_[op].writes.size()) {
      prefetch(ops_[op].writes[write].value);
    }
  }
}

void Tape::prefetch(int32_t index) {
  Value& value = values_[index];
  if (!value.offloaded || value.held_bytes > 0) return;
  if (ledger_->live_bytes() + value.bytes > forms_->budget_bytes) return;
  value.offloaded->prefetch();
  value.held_bytes = value.bytes;
  ledger_->add(value.held_bytes);
}

// Whether a value that it wrote is, and has to be replayed for that.
bool Tape::is_asked_for(const Op& op) const {
  return std::any_of(op.writes.begin(), op.writes.end(),
                     [&](const Slot& slot) { return values_[slot.value].num_users > 0 && !is_there(slot.value); });
}

// It will not be called again, but to be rehearsed.
void Tape::forget_arguments(Op& op) const {
  if (is_profile_) return;
  op.args.clear();
  op.refs.clear();
}

void Tape::drop_user(int32_t value) {
  std::vector<int32_t> todo{value};
  while (!todo.empty()) {
    const int32_t next = todo.back();
    todo.pop_back();
    if (values_[next].num_users == 0) continue;  // a destructor cannot say that this is wrong
    if (--values_[next].num_users > 0) continue;
    let_go(next);
    if (values_[next].op < 0) continue;
    Op& op = ops_[values_[next].op];
    if (!op.is_pending || is_asked_for(op)) continue;
    op.is_pending = false;
    todo.insert(todo.end(), op.reads.begin(), op.reads.end());
    forget_arguments(op);
  }
}

at::Tensor Tape::checked(const TensorRef& ref) const {
  if (is_freed(ref)) {
    checkpoint::throw_checkpoint_error(
        text("the memory of a tensor of ", c10::IntArrayRef(ref.sizes), " ", ref.dtype,
             " that the forward pass read has been freed before backward came to what needs it. "
             "Usually FSDP reshards its parameters after forward: set reshard_after_forward=False, "
             "or leave that module without a budget."));
  }
  if (is_written(ref)) {
    checkpoint::throw_checkpoint_error(
        text("a tensor of ", c10::IntArrayRef(ref.sizes), " ", ref.dtype,
             " that the forward pass read, but did not make (a parameter, a buffer or an input), was modified in place "
             "before backward came to what needs it: gradients would be those of other values. Usually an optimizer "
             "stepped in between, or an input is reused: clone it, or write it after backward."));
  }
  return ref.direct;
}

at::Tensor Tape::take(const Saved& saved) {
  const Locked lock(mutex_);
  if (saved.ref.value < 0) return checked(saved.ref);
  check_usable();
  if (is_profile_) uses_.push_back({saved.ref.value, false, ledger_->next_use()});
  if (is_timed_in_backward_) rehearse_value(saved.ref.value);
  materialise(saved.ref.value);
  prefetch_planned_at(saved.ref.value);
  prefetch_before(saved.ref.value);
  check_unwritten(saved.ref);
  return view_of(values_[saved.ref.value].held, saved.ref);
}

void Tape::check_usable() const {
  if (is_abandoned_) {
    checkpoint::throw_checkpoint_error("this graph is of a step that did not fit into memory: run forward again.");
  }
  if (is_broken_) {
    checkpoint::throw_checkpoint_error(
        "an earlier backward through this graph failed while it recomputed: run forward again.");
  }
}

// Whoever else has it, as a result of the model for instance, may write to it once the pass is over.
void Tape::check_unwritten(const TensorRef& ref) const {
  const Value& value = values_[ref.value];
  if (value.is_torn || value.held._version() == value.held_version) return;
  checkpoint::throw_checkpoint_error(
      text("a tensor of ", c10::IntArrayRef(ref.sizes), " ", ref.dtype,
           " that backward needs was modified in place after the forward pass: gradients would be those of other "
           "values. Write to a clone of it, use an operation that is not in place, or give what writes to it the "
           "budget, too: writes between forward's beginning and end, or inside `with plan:`, are known."));
}

void Tape::check_checksums(const Op& op) const {
  for (const TensorRef& ref : op.refs) {
    if (!ref.checksum || (ref.value >= 0 && (values_[ref.value].is_remade || values_[ref.value].is_torn))) continue;
    if (hash_of_elements(ref.value < 0 ? checked(ref) : view_of(values_[ref.value].held, ref)) == ref.checksum)
      continue;
    checkpoint::throw_checkpoint_error(text(
        name_of(op, ref), ", which ", op.traits->name, place_of(static_cast<int32_t>(&op - ops_.data())),
        " read in the forward pass, has other values when backward computes that again, though nothing that counts "
        "writes has written it: gradients would be those of other values. Usually x.numpy(), DLPack or an operator of "
        "your own gave its memory to somebody who reuses it: write to a clone, or after backward."));
  }
}

// " in 'blocks.0.mlp'"
std::string Tape::place_of(int32_t op) const {
  if (!plan_ || op < 0 || static_cast<size_t>(op) >= plan_->ops.size() || plan_->ops[op].module.empty()) return "";
  return text(" in '", plan_->ops[op].module, "'");
}

std::string Tape::name_of(const Op& op, const TensorRef& ref) const {
  const std::string shape = text(c10::IntArrayRef(ref.sizes), " ", ref.dtype);
  if (ref.value >= 0) {
    const int32_t made_by = values_[ref.value].op;
    return made_by < 0 ? text("a tensor of ", shape, " that no operation was seen to make")
                       : text("what ", ops_[made_by].traits->name, place_of(made_by), " gave (", shape, ")");
  }
  const std::string owner = model_ ? checkpoint::owner_in(*model_, ref.direct) : "";
  if (!owner.empty()) return text(owner, " (", shape, ")");
  return text("a tensor of ", shape, " that the model was given (argument '",
              op.handle.schema().arguments()[ref.arg].name(), "')");
}

void Tape::release(const Saved& saved) {
  const Locked lock(mutex_);
  --num_saved_;
  const int32_t value = saved.ref.value;
  if (value < 0) return;
  --values_[value].num_saved;
  if (is_profile_) uses_.push_back({value, true, ledger_->next_use()});
  if (has_ended_) drop_user(value);
}

void Tape::materialise(int32_t value) {
  std::vector<int32_t> todo{value};
  while (!todo.empty()) {
    const Value& next = values_[todo.back()];
    bring_back(todo.back());
    if (next.held.defined()) {
      todo.pop_back();
      continue;
    }
    DT_INVARIANT(next.op >= 0 && next.can_forget);
    const size_t before = todo.size();
    const std::vector<int32_t>& reads = ops_[next.op].reads;
    for (auto read = reads.rbegin(); read != reads.rend(); ++read) {  // the first one first, as the solver has it
      if (!values_[*read].held.defined()) todo.push_back(*read);
    }
    if (todo.size() == before) replay(next.op);
  }
}

std::vector<at::Tensor> Tape::call(Op& op, const std::function<at::Tensor(const TensorRef&)>& tensor_of) {
  if (op.traits->is_removed) {
    checkpoint::throw_checkpoint_error(
        text(op.traits->name,
             " was removed after forward called it, and backward needs it again: keep its "
             "torch.library.Library until then."));
  }
  torch::jit::Stack stack;
  stack.reserve(op.args.size());
  for (const c10::IValue& arg : op.args) stack.push_back(arg.isList() ? arg.toList().copy() : arg);
  for (const TensorRef& ref : op.refs) {
    const at::Tensor tensor = tensor_of(ref);
    if (ref.element < 0) {
      stack[ref.arg] = tensor;
    } else {
      c10::impl::GenericList list = stack[ref.arg].toList();
      list.set(ref.element, tensor);
    }
  }
  std::vector<at::Tensor> arguments;  // that are written
  for (const Slot& slot : op.writes) {
    if (!slot.is_argument) continue;
    arguments.push_back(tensor_in(stack[slot.index], slot.element));
  }
  {
    const Below below(op.local_keys, op.is_grad_enabled);
    const checkpoint::RandomStatesGuard random_states(op.random_states.get());
    std::optional<checkpoint::AutocastGuard> autocast;
    if (*op.autocast != checkpoint::Autocast::now()) autocast.emplace(*op.autocast);
    op.handle.redispatchBoxed(op.keys, &stack);
  }
  std::vector<at::Tensor> results;
  size_t next_argument = 0;
  for (const Slot& slot : op.writes) {
    results.push_back(slot.is_argument ? arguments[next_argument++] : tensor_in(stack[slot.index], slot.element));
  }
  return results;
}

// Memory for each value that the operation writes over.
std::unordered_map<int32_t, at::Tensor> Tape::writable(const Op& op,
                                                       const std::function<at::Tensor(int32_t)>& memory_of) {
  std::unordered_map<int32_t, at::Tensor> memory;
  for (const TensorRef& ref : op.refs) {
    if (ref.value >= 0 && op.traits->writes[ref.arg] && memory.count(ref.value) == 0) {
      memory.emplace(ref.value, memory_of(ref.value));
    }
  }
  return memory;
}

void Tape::replay(int32_t index) {
  Op& op = ops_[index];
  for (const TensorRef& ref : op.refs) {
    if (ref.value >= 0) check_unwritten(ref);
  }
  if (is_checked_) check_checksums(op);
  const double begin = now();
  std::unordered_map<int32_t, at::Tensor> written = writable(op, [&](int32_t read) {
    // Its memory is taken over where nobody else needs it.
    if (!has_ended_ || values_[read].num_users > 1) return copy_of(values_[read].held);
    const at::Tensor taken = values_[read].held;
    let_go(read);
    is_broken_ = true;  // until the call has made of it what it should
    return taken;
  });
  const std::vector<at::Tensor> results = call(op, [&](const TensorRef& ref) {
    if (ref.value < 0) return checked(ref);
    const auto found = written.find(ref.value);
    return view_of(found == written.end() ? values_[ref.value].held : found->second, ref);
  });
  written.clear();
  is_broken_ = false;
  const double seconds = now() - begin;
  if (plan_ && static_cast<size_t>(index) < plan_->seconds.size()) plan_->seconds[index] += seconds;
  ledger_->note_replay(seconds);
  for (size_t i = 0; i < op.writes.size(); ++i) {
    Value& value = values_[op.writes[i].value];
    if (is_there(op.writes[i].value)) continue;
    if (static_cast<int64_t>(results[i].storage().nbytes()) != value.bytes) {
      checkpoint::throw_checkpoint_error(text(op.traits->name, " gave ", results[i].storage().nbytes(),
                                              " bytes where it gave ", value.bytes, " in the forward pass."));
    }
    hold(op.writes[i].value, results[i]);
    value.is_remade = true;
  }
  if (!has_ended_) return;
  for (const Slot& slot : op.writes) {
    if (values_[slot.value].num_users == 0) let_go(slot.value);
  }
  op.is_pending = false;
  for (const int32_t read : op.reads) drop_user(read);
  forget_arguments(op);
}

}  // namespace drivetrain::budget
