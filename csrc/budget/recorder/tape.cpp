// Implements the few functions of a tape's data; see tape.h.
#include "budget/recorder/tape.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/check.h"

namespace drivetrain::budget {

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

std::string Tape::module_of(int32_t op) const {
  if (op < 0 || ops[op].planned < 0 || plan->ops[ops[op].planned].module.empty()) return "";
  return text(" in '", plan->ops[ops[op].planned].module, "'");
}

}  // namespace drivetrain::budget
