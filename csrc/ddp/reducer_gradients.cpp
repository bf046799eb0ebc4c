// One gradient's way into the reducer's arena, and, when it is the mean, back to the parameter.
#include <ATen/ops/mul.h>
#include <c10/util/Exception.h>

#include "base/check.h"
#include "base/torch_text.h"
#include "ddp/reducer.h"
#include "ddp/tensors.h"

namespace drivetrain::ddp {

void Reducer::check_gradient(const Parameter& param, const at::Tensor& grad) const {
  const at::Tensor& tensor = param.tensor;
  if (param.sparse != (grad.layout() == at::kSparse) || (grad.layout() != at::kStrided && !param.sparse)) {
    throw_type_error(text("the gradient of parameter '", param.name, "' is ", grad.layout(), ", expected ",
                          param.sparse ? "Sparse (its Embedding has sparse=True)" : "Strided",
                          ": set sparse the same in every Embedding that shares the parameter, and to True only where "
                          "nothing else uses it."));
  }
  if (grad.scalar_type() != grad_dtype(param) || grad.device() != tensor.device() ||
      !grad.sizes().equals(tensor.sizes())) {
    throw_type_error(text("the gradient of parameter '", param.name, "' is ", grad.scalar_type(), " ", grad.sizes(),
                          " on ", grad.device().str(), ", expected ", grad_dtype(param), " ", tensor.sizes(), " on ",
                          tensor.device().str(),
                          ": do not assign .grad or set grad_dtype to another type under "
                          "DistributedDataParallel."));
  }
}

// A hook that runs before ours may have stepped the parameter with this rank's own gradient: the replicas would part.
void Reducer::check_unconsumed(const Parameter& param, bool came) const {
  if (low_precision_ || optimizer_in_backward_ || comm_->size() == 1 || rpc_context_) return;
  const bool taken = came && !param.tensor.grad().defined();
  if (!taken && param.tensor._version() == param.version) return;
  throw EnvironmentError(text(
      "parameter '", param.name, taken ? "' lost its gradient" : "' was changed",
      " during backward, before its gradient was reduced over ranks: a hook (register_post_accumulate_grad_hook, an "
      "optimizer fused into backward) used this rank's own gradient, and the replicas would part. Step after backward, "
      "use torch.distributed.optim._apply_optimizer_in_backward before wrapping, or a communication hook."));
}

const void* Reducer::address_of(const Parameter& param) const {
  return static_cast<const char*>(buckets_[param.bucket].flat.const_data_ptr()) + param.offset;
}

bool Reducer::is_in_place(const Parameter& param, const at::Tensor& grad) const {
  return grad.const_data_ptr() == address_of(param) && grad.strides().equals(param.view.strides());
}

// Before the place gets a gradient that is not accumulated into the one before: tensors that the script still has over
// it (p.grad.flatten(), say) keep what they show, in memory of their own. What .grad shows is written in place, as
// torch accumulates. Pointers, such as those of NumPy's arrays, cannot be moved.
void Reducer::leave_to_holders(Parameter& param) {
  if (!param.view.defined() || param.view.numel() == 0) return;
  if (param.view.const_data_ptr() != address_of(param)) {  // .grad.data was assigned to, and with that our view
    param.view = view_of(param);
    return;
  }
  if (options_.gradients_stay_views || on_moved_) return;
  const at::Tensor& grad = param.tensor.grad();
  if (grad.defined() && grad.layout() == at::kStrided && is_in_place(param, grad)) return;
  // A reference to the tensor itself would keep its storage busy only if we had let go of it.
  if (param.view.use_count() > 1) param.view = param.view.variable_data();
  const at::Storage held = param.view.storage();
  if (held.use_count() <= 2) return;  // this one's and the view's
  at::Tensor copy = param.view.clone();
  held.set_data_ptr_noswap(copy.storage().set_data_ptr(at::DataPtr(nullptr, param.view.device())));
  param.view = view_of(param);
}

// One pass from `values` to the parameter's place in the arena.
void Reducer::fill_view(Parameter& param, const at::Tensor& values, double scale) {
  leave_to_holders(param);
  if (scale != 1) {
    at::mul_out(param.view, values, as_scalar(scale));
  } else {
    param.view.copy_(values);
  }
}

// Lets `body` read and replace the gradient that this backward accumulates into. The context's entry is written back.
template <class Body>
void Reducer::with_grad(Parameter& param, Body&& body) {
  if (!rpc_context_) {
    body(param.tensor.mutable_grad());
    return;
  }
  rpc_context_->runGradCallbackForVariable(param.tensor, [&](at::Tensor& grad) {
    body(grad);
    return true;
  });
}

// Moves the gradient to its place in the arena, scaled for the sum over ranks, and lets .grad be that place.
void Reducer::take_gradient(Parameter& param, double scale) {
  with_grad(param, [&](at::Tensor& grad) { move_gradient(param, grad, scale); });
}

void Reducer::move_gradient(Parameter& param, at::Tensor& grad, double scale) {
  check_gradient(param, grad);
  if (param.sparse) {
    // A tensor of its own: autograd lets sparse gradients of several parameters share their values.
    grad = scale != 1 ? grad.mul(as_scalar(scale)) : grad.clone();
    return;
  }
  if (grad.requires_grad()) {
    TORCH_WARN_ONCE(
        "DistributedDataParallel and backward with create_graph=True: the gradients' values are reduced over ranks, "
        "the gradients of those gradients are not (as with torch's class).");
    fill_view(param, grad.detach(), scale);
    param.differentiable = grad;
    return;
  }
  if (is_in_place(param, grad)) {
    if (scale != 1) grad.mul_(as_scalar(scale));
    return;
  }
  fill_view(param, grad, scale);
  grad = param.view;
}

void Reducer::mark_ready(size_t index) {
  Parameter& param = params_[index];
  if (param.ready) {
    throw EnvironmentError(text(
        "Expected to mark a variable ready only once, but parameter '", param.name,
        "' got a second gradient in the same synchronised backward. Either it is used in several reentrant backward "
        "passes (torch.utils.checkpoint with use_reentrant=True: pass use_reentrant=False, or static_graph=True to "
        "DistributedDataParallel), or it is used outside the wrapped module's forward (call the wrapper, not its "
        ".module), or backward ran twice after one forward."));
  }
  param.ready = true;
  param.delegated = !claim(param);
  Bucket& bucket = buckets_[param.bucket];
  if (!reuses_memory_) fill_place(param);
  DT_INVARIANT(bucket.missing > 0);
  if (--bucket.missing == 0) bucket.phase = Phase::kFull;
}

// Puts what this rank adds to the sum where the transport will take it.
void Reducer::fill_place(Parameter& param) {
  Bucket& bucket = buckets_[param.bucket];
  double scale = scaling_.before;
  // Sparse gradients are always summed.
  if (param.sparse && !comm_hook_ && !weight_) scale = 1.0 / (divisor_ > 0 ? divisor_ : comm_->size());
  if (param.delegated && !param.sparse) {
    leave_to_holders(param);
    param.view.zero_();
  } else if (!param.without_grad) {
    take_gradient(param, scale);
    if (param.sparse) with_grad(param, [&](at::Tensor& grad) { bucket.flat = grad; });
  } else if (const at::Tensor& kept = param.tensor.grad(); kept.defined() && !rpc_context_) {
    // Other ranks may have used it: then this rank's share is what it has kept so far.
    check_gradient(param, kept);
    param.untouched = kept.clone();
    if (param.sparse) {
      bucket.flat = kept.clone().mul_(as_scalar(scale));
    } else {
      fill_view(param, param.untouched, scale);
    }
  } else if (param.sparse) {
    bucket.flat = no_rows(param.tensor);
  } else {
    leave_to_holders(param);
    param.view.zero_();
  }
}

// Also for parameters that had a gradient: another hook may have re-pointed .grad since (that of a second wrapper
// around the same parameter does).
void Reducer::finish_param(Parameter& param, bool used_somewhere) {
  if (param.delegated) return;
  if (!used_somewhere) {
    if (param.untouched.defined()) param.tensor.mutable_grad().copy_(param.untouched);
    return;
  }
  if (rpc_context_ && param.without_grad) {
    forget_step();
    throw_unsupported(text("parameter '", param.name,
                           "' got a gradient on other ranks and none on this one: a context of distributed autograd "
                           "(torch.distributed.autograd) has no place for it. Use every parameter on every rank."));
  }
  if (param.differentiable.defined()) {
    param.differentiable.detach().copy_(param.view);
    param.tensor.mutable_grad() = param.differentiable;
    return;
  }
  const at::Tensor& result = param.sparse ? buckets_[param.bucket].flat : param.view;
  result.unsafeGetTensorImpl()->bump_version();  // transports write memory
  with_grad(param, [&](at::Tensor& grad) {
    if (!grad.is_same(result)) grad = result;
  });
}

}  // namespace drivetrain::ddp
