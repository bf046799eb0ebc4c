// Moves gradients into the flat buffer and hands their means back to the parameters.
#include "ddp/step_gradients.h"

#include <c10/util/Exception.h>

#include "base/check.h"
#include "ddp/errors.h"
#include "ddp/tensors.h"

namespace drivetrain::ddp {

void StepGradients::reset() {
  for (ParamStep& step : steps_) {
    step.ready = step.without_grad = step.delegated = false;
    step.untouched = step.own_grad = at::Tensor();
    step.fired = 0;
  }
  buffer_.forget_sparse_gradients();
  store_.use(nullptr);
}

std::vector<size_t> StepGradients::missing() const {
  std::vector<size_t> missing;
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (!steps_[i].ready) missing.push_back(i);
  }
  return missing;
}

// A gradient that autograd does not add to a `.grad` shares memory with the one that came, or is a new copy.
void StepGradients::note_accumulation(size_t param, const at::Tensor& came) {
  const at::Tensor& grad = params_[param].tensor.grad();
  const auto is_strided = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_inference();
  };
  steps_[param].was_accumulated =
      is_strided(came) && is_strided(grad) && grad._version() > 0 && !grad.is_alias_of(came);
}

void StepGradients::take(size_t param, double scale) {
  store_.with(params_[param].tensor, [&](at::Tensor& grad) { move_to_region(param, grad, scale); });
}

void StepGradients::move_to_region(size_t param, at::Tensor& grad, double scale) {
  check_gradient(params_[param], grad, buffer_.grad_dtype(param));
  if (params_[param].sparse) {
    // Autograd lets sparse gradients of several parameters share their values, so this one needs its own.
    grad = scale != 1 ? grad.mul(as_scalar(scale)) : grad.clone();
    return;
  }
  if (grad.requires_grad()) {
    TORCH_WARN_ONCE(
        "DistributedDataParallel and backward with create_graph=True: the gradients' values are reduced over ranks, "
        "the gradients of those gradients are not (as with torch's class).");
    buffer_.fill(param, grad.detach(), scale);
    steps_[param].own_grad = grad;
    return;
  }
  if (buffer_.is_in_place(param, grad)) {
    buffer_.restore_view(param);
    if (scale != 1) grad.mul_(as_scalar(scale));
    return;
  }
  buffer_.fill(param, grad, scale);
  if (steps_[param].was_accumulated && !store_.is_context() && buffer_.is_scripts_own(grad)) {
    steps_[param].own_grad = grad;
  } else {
    grad = buffer_.region(param).view;
  }
}

void StepGradients::put_in(size_t param, double scale) {
  ParamStep& step = steps_[param];
  const Parameter& of = params_[param];
  Bucket& bucket = buffer_.bucket(buffer_.region(param).bucket);
  if (step.delegated && !of.sparse) {
    buffer_.fill_zeros(param);
  } else if (!step.without_grad) {
    take(param, scale);
    if (of.sparse) store_.with(of.tensor, [&](at::Tensor& grad) { bucket.flat = grad; });
  } else if (const at::Tensor& kept = of.tensor.grad(); kept.defined() && !store_.is_context()) {
    // Other ranks may have used the parameter. This rank's share is then what it has accumulated so far.
    check_gradient(of, kept, buffer_.grad_dtype(param));
    step.untouched = kept.clone();
    if (!of.sparse && !buffer_.is_in_place(param, kept) && buffer_.is_scripts_own(kept)) step.own_grad = kept;
    if (of.sparse) {
      bucket.flat = kept.clone().mul_(as_scalar(scale));
    } else {
      buffer_.fill(param, step.untouched, scale);
    }
  } else if (of.sparse) {
    bucket.flat = no_rows(of.tensor);
  } else {
    buffer_.fill_zeros(param);
  }
}

void StepGradients::hand_back(size_t param, bool used) {
  ParamStep& step = steps_[param];
  const Parameter& of = params_[param];
  if (step.delegated) return;
  // Under gradient_as_bucket_view=True, torch leaves the mean in a kept gradient also where no rank used the parameter.
  const bool keeps_mean = buffer_.settings.stays_views && !of.sparse && step.untouched.defined();
  if (!used && !keeps_mean) {
    if (step.untouched.defined()) of.tensor.mutable_grad().copy_(step.untouched);
    return;
  }
  if (store_.is_context() && step.without_grad) {
    forget_step_();
    throw_unsupported(text("parameter '", of.name,
                           "' got a gradient on other ranks and none on this one. A context of distributed autograd "
                           "(torch.distributed.autograd) has no entry for it. Use every parameter on every rank."));
  }
  if (step.own_grad.defined()) {
    step.own_grad.detach().copy_(buffer_.region(param).view);
    of.tensor.mutable_grad() = step.own_grad;
    return;
  }
  const at::Tensor& result = of.sparse ? buffer_.bucket(buffer_.region(param).bucket).flat : buffer_.region(param).view;
  result.unsafeGetTensorImpl()->bump_version();  // transports write memory past autograd
  // Another hook, such as a second wrapper's, may have replaced a `.grad` that was the view.
  store_.with(of.tensor, [&](at::Tensor& grad) {
    if (!grad.is_same(result)) grad = result;
  });
}

void StepGradients::copy_to_full_precision(const Bucket& bucket, const at::Tensor& result) {
  for (size_t index : bucket.params) {
    const at::Tensor& tensor = params_[index].tensor;
    at::Tensor& grad = tensor.mutable_grad();
    if (!grad.defined() || grad.scalar_type() == buffer_.grad_dtype(index)) continue;
    const int64_t first = buffer_.region(index).offset / bucket.flat.element_size();
    const at::Tensor piece = result.narrow(0, first, tensor.numel());
    grad.copy_(piece.as_strided(tensor.sizes(), buffer_.region(index).view.strides(), piece.storage_offset()));
    steps_[index].own_grad = at::Tensor();
  }
}

}  // namespace drivetrain::ddp
