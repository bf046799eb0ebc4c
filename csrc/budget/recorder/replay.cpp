// Replays recorded operations; see replay.h.
#include "budget/recorder/replay.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "budget/recorder/arguments.h"
#include "budget/recorder/device_timer.h"
#include "recompute/region.h"
#include "trace/span.h"

namespace drivetrain::budget {
namespace {

// Dispatches below autograd in the thread state that the recorded call had, as long as the object lives.
class RecordedStateGuard {
 public:
  RecordedStateGuard(const c10::impl::LocalDispatchKeySet& keys, bool is_grad_enabled)
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

}  // namespace

void Replay::count_users() {
  has_counted_users_ = true;
  for (Value& value : tape_.values) value.num_users = value.num_saved;
  for (size_t i = tape_.ops.size(); i-- > 0;) {
    RecordedOp& op = tape_.ops[i];
    op.is_pending = is_needed(op);
    if (op.is_pending) {
      for (const int32_t read : op.reads) ++tape_.values[read].num_users;
    } else {
      op.forget_arguments();
    }
  }
}

void Replay::let_go_unused() {
  for (size_t value = 0; value < tape_.values.size(); ++value) {
    if (tape_.values[value].num_users == 0) store_.let_go(static_cast<int32_t>(value));
  }
}

// Returns whether a value that it wrote has users, but is not stored.
bool Replay::is_needed(const RecordedOp& op) const {
  return std::any_of(op.writes.begin(), op.writes.end(), [&](const OpResult& result) {
    return tape_.values[result.value].num_users > 0 && !store_.has(result.value);
  });
}

void Replay::drop_user(int32_t value) {
  const trace::RecomputationTally tally;
  std::vector<int32_t> todo{value};
  while (!todo.empty()) {
    const int32_t next = todo.back();
    todo.pop_back();
    if (tape_.values[next].num_users == 0) continue;  // destructors come here, so this does not throw
    if (--tape_.values[next].num_users > 0) continue;
    store_.let_go(next);
    if (tape_.values[next].op < 0) continue;
    RecordedOp& op = tape_.ops[tape_.values[next].op];
    if (!op.is_pending || is_needed(op)) continue;
    op.is_pending = false;
    todo.insert(todo.end(), op.reads.begin(), op.reads.end());
    op.forget_arguments();
  }
}

void Replay::release(int32_t value) {
  --tape_.values[value].num_saved;
  if (has_counted_users_) drop_user(value);
}

void Replay::check_usable() const {
  if (is_abandoned_) {
    recompute::throw_checkpoint_error("this graph belongs to a step that did not fit into memory: run forward again.");
  }
  if (is_interrupted_) {
    recompute::throw_checkpoint_error(
        "an earlier backward through this graph failed while it recomputed: run forward again.");
  }
}

at::Tensor Replay::take(const TensorRef& ref) {
  materialize(ref.value);
  store_.prefetch_planned_at(ref.value);
  store_.prefetch_before(ref.value);
  checks_.check_unwritten(ref);
  return view_of(tape_.values[ref.value].held, ref);
}

void Replay::materialize(int32_t value) {
  std::optional<recompute::SwitchesGuard> switches;
  std::vector<int32_t> todo{value};
  while (!todo.empty()) {
    const Value& next = tape_.values[todo.back()];
    store_.restore(todo.back());
    if (next.held.defined()) {
      todo.pop_back();
      continue;
    }
    DT_INVARIANT(next.op >= 0 && next.can_recompute);
    const size_t before = todo.size();
    const std::vector<int32_t>& reads = tape_.ops[next.op].reads;
    // The first read is replayed first, as the solver assumes.
    for (auto read = reads.rbegin(); read != reads.rend(); ++read) {
      if (!tape_.values[*read].held.defined()) todo.push_back(*read);
    }
    if (todo.size() > before) continue;
    if (!switches) switches.emplace(switches_);
    replay(next.op);
  }
}

std::vector<at::Tensor> Replay::call(RecordedOp& op, const std::function<at::Tensor(const TensorRef&)>& tensor_of,
                                     std::optional<DeviceTimer>* timer) const {
  if (op.traits->is_removed) {
    recompute::throw_checkpoint_error(text(op.traits->name,
                                           " was removed after forward called it, and backward needs it again: keep "
                                           "its torch.library.Library until then."));
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
  std::vector<at::Tensor> written_arguments;
  for (const OpResult& result : op.writes) {
    if (!result.is_argument) continue;
    written_arguments.push_back(tensor_in(stack[result.index], result.element));
  }
  {
    const RecordedStateGuard recorded_state(op.local_keys, op.is_grad_enabled);
    const recompute::RandomStatesGuard random_states(op.random_states.get());
    std::optional<recompute::AutocastGuard> autocast;
    if (*op.autocast != recompute::Autocast::now()) autocast.emplace(*op.autocast);
    if (timer != nullptr) timer->emplace(device_of(stack));
    op.handle.redispatchBoxed(op.keys, &stack);
    if (timer != nullptr) (*timer)->stop();
  }
  std::vector<at::Tensor> results;
  size_t next_argument = 0;
  for (const OpResult& result : op.writes) {
    results.push_back(result.is_argument ? written_arguments[next_argument++]
                                         : tensor_in(stack[result.index], result.element));
  }
  return results;
}

// Returns the memory to call an operation with for each value that it writes over.
std::unordered_map<int32_t, at::Tensor> Replay::writable(const RecordedOp& op) {
  std::unordered_map<int32_t, at::Tensor> memory;
  for (const TensorRef& ref : op.refs) {
    if (ref.value < 0 || !op.traits->writes[ref.arg] || memory.count(ref.value) != 0) continue;
    const at::Tensor held = tape_.values[ref.value].held;
    // The operation writes over the value itself if it is the last user, otherwise over a copy.
    const bool takes_over = has_counted_users_ && tape_.values[ref.value].num_users <= 1;
    memory.emplace(ref.value, takes_over ? held : copy_of(held));
    if (!takes_over) continue;
    store_.let_go(ref.value);
    is_interrupted_ = true;  // until the call has returned
  }
  return memory;
}

void Replay::replay(int32_t index) {
  RecordedOp& op = tape_.ops[index];
  for (const TensorRef& ref : op.refs) {
    if (ref.value >= 0) checks_.check_unwritten(ref);
  }
  checks_.check_checksums(op);
  const double begin = now();
  std::unordered_map<int32_t, at::Tensor> written = writable(op);
  std::optional<DeviceTimer> timer;
  const std::vector<at::Tensor> results = call(
      op,
      [&](const TensorRef& ref) {
        if (ref.value < 0) return checks_.existing(ref);
        const auto found = written.find(ref.value);
        return view_of(found == written.end() ? tape_.values[ref.value].held : found->second, ref);
      },
      observer_ ? &timer : nullptr);
  written.clear();
  is_interrupted_ = false;
  const double seconds = now() - begin;
  if (op.planned >= 0) tape_.plan->seconds[op.planned] += seconds;
  tracker_->count_replay(seconds);
  if (observer_) observer_(index, std::move(*timer), results);
  for (size_t i = 0; i < op.writes.size(); ++i) {
    Value& value = tape_.values[op.writes[i].value];
    if (store_.has(op.writes[i].value)) continue;
    if (static_cast<int64_t>(results[i].storage().nbytes()) != value.bytes) {
      recompute::throw_checkpoint_error(text(op.traits->name, " returned ", results[i].storage().nbytes(),
                                             " bytes when it was recomputed, expected ", value.bytes,
                                             " bytes as in the forward pass."));
    }
    store_.hold(op.writes[i].value, results[i]);
    value.is_recomputed = true;
  }
  if (!has_counted_users_) return;
  for (const OpResult& result : op.writes) {
    if (tape_.values[result.value].num_users == 0) store_.let_go(result.value);
  }
  op.is_pending = false;
  for (const int32_t read : op.reads) drop_user(read);
  op.forget_arguments();
}

}  // namespace drivetrain::budget
