// Calls recorded operations again, and describes them; see tape.h.
#include "budget/recorder/tape.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "base/check.h"
#include "budget/recorder/arguments.h"
#include "recompute/region.h"

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

saved_tensors::Packing packing_of(int8_t format) {
  return format == kAsBits       ? saved_tensors::Packing::kBits
         : format == kAsBFloat16 ? saved_tensors::Packing::kBFloat16
                                 : saved_tensors::Packing::kInt8;
}

RecordedOp::RecordedOp(const c10::OperatorHandle& handle, const OpTraits& traits, c10::DispatchKeySet keys,
                       int32_t module)
    : traits(&traits),
      handle(handle),
      keys((keys & c10::after_ADInplaceOrView_keyset) - kPythonKeys),
      local_keys(c10::impl::tls_local_dispatch_key_set()),
      is_grad_enabled(c10::GradMode::is_enabled()),
      module(module) {}

bool RecordedOp::can_replay() const {
  for (const TensorRef& ref : refs) {
    if (ref.value >= 0) {
      if (traits->is_statistic(ref.arg)) return false;  // the pass made it, and a replay would update it again
      continue;
    }
    if (!ref.direct.defined()) return false;    // the recorder cannot describe it
    if (traits->writes[ref.arg]) return false;  // its previous contents are lost
  }
  if (traits->is_never_replayed) return false;
  return std::none_of(args.begin(), args.end(), [](const c10::IValue& arg) { return arg.isGenerator(); });
}

bool RecordedOp::has_changed_inputs() const {
  return std::any_of(refs.begin(), refs.end(),
                     [](const TensorRef& ref) { return ref.value < 0 && (is_freed(ref) || is_written(ref)); });
}

void RecordedOp::forget_arguments() {
  args.clear();
  refs.clear();
}

std::vector<at::Tensor> RecordedOp::call(const std::function<at::Tensor(const TensorRef&)>& tensor_of,
                                         std::optional<DeviceTimer>* timer) const {
  if (traits->is_removed) {
    recompute::throw_checkpoint_error(text(traits->name,
                                           " was removed after forward called it, and backward needs it again: keep "
                                           "its torch.library.Library until then."));
  }
  torch::jit::Stack stack;
  stack.reserve(args.size());
  for (const c10::IValue& arg : args) stack.push_back(arg.isList() ? arg.toList().copy() : arg);
  for (const TensorRef& ref : refs) {
    const at::Tensor tensor = tensor_of(ref);
    if (ref.element < 0) {
      stack[ref.arg] = tensor;
    } else {
      c10::impl::GenericList list = stack[ref.arg].toList();
      list.set(ref.element, tensor);
    }
  }
  std::vector<at::Tensor> written_arguments;
  for (const OpResult& result : writes) {
    if (!result.is_argument) continue;
    written_arguments.push_back(tensor_in(stack[result.index], result.element));
  }
  {
    const RecordedStateGuard recorded_state(local_keys, is_grad_enabled);
    const recompute::RandomStatesGuard random_states_guard(random_states.get());
    std::optional<recompute::AutocastGuard> autocast_guard;
    if (*autocast != recompute::Autocast::now()) autocast_guard.emplace(*autocast);
    if (timer != nullptr) timer->emplace(device_of(stack));
    handle.redispatchBoxed(keys, &stack);
    if (timer != nullptr) (*timer)->stop();
  }
  std::vector<at::Tensor> results;
  size_t next_argument = 0;
  for (const OpResult& result : writes) {
    results.push_back(result.is_argument ? written_arguments[next_argument++]
                                         : tensor_in(stack[result.index], result.element));
  }
  return results;
}

std::string Tape::module_of(int32_t op) const {
  if (op < 0 || ops[op].planned < 0 || plan->ops[ops[op].planned].module.empty()) return "";
  return text(" in '", plan->ops[ops[op].planned].module, "'");
}

}  // namespace drivetrain::budget
