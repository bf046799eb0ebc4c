// Weights of a step's gradients: what they count, whether it still is there, and the mean over it. What only a device
// knows the host hears of in a later step, so that it waits for nothing.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/check.h"
#include "ddp/reducer.h"
#include "ddp/tensors.h"

namespace drivetrain::ddp {
namespace {

constexpr const char* kUncounted =
    "backward(loss, weight=...) found gradients that no weight counts: those of an earlier synchronised backward, of a "
    "backward without weight, or of one that raised. Call optimizer.zero_grad() first.";
constexpr const char* kUnweighted =
    "this backward has no weight, but the gradients that it adds to were given with backward(loss, weight=...): give "
    "every backward of an accumulation a weight, or call optimizer.zero_grad() first.";
constexpr const char* kWasLate =
    " It was an earlier backward, whose gradients are wrong: the device found it, and the host does not wait for that.";

// In place by a factor that only the device knows: float64 [1]. The same bits as by the factor as a number.
void scale_by(const at::Tensor& values, const at::Tensor& factor) {
  const at::Tensor real = as_real(values);
  const at::Tensor here = factor.to(real.device(), /*non_blocking=*/true);
  if (real.element_size() > 2) {
    real.mul_(here.squeeze());
    return;
  }
  // A tensor of one element would first be rounded to the 16 bits.
  at::Tensor not_finite = at::zeros({1}, here.options().dtype(at::kFloat));
  at::_amp_foreach_non_finite_check_and_unscale_({real}, not_finite, here.to(at::kFloat));
}

}  // namespace

void Reducer::begin_weighted(double weight) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (optimizer_in_backward_ || on_reduced_ || low_precision_) {
    throw UnsupportedError(
        "backward(loss, weight=...) does not go together with optimizers that run inside backward, nor with DDP's "
        "mixed_precision: both use gradients before the sum of weights is known.");
  }
  const at::NoGradGuard no_grad_tracking;
  check_late();
  const auto is_untouched = [this](const Parameter& param) { return param.weighted == seen_grad(param); };
  // Only where gradients have been touched since the last weight need they be read.
  if (!weight_ || !std::all_of(params_.begin(), params_.end(), is_untouched)) forget_zeroed_weights();
  weight_ = weight_.value_or(0) + weight;
  is_weighted_ = true;
  weighted_from_ = steps_;
}

// Gradients that were zeroed leave nothing for their weights to count.
void Reducer::forget_zeroed_weights() {
  std::vector<at::Tensor> grads;
  for (const Parameter& param : params_) {
    if (param.tensor.grad().defined()) grads.push_back(param.tensor.grad());
  }
  const at::Tensor holds = hold_anything(grads);
  if (!holds.is_cpu()) {
    if (!weight_) {
      uncounted_.add(holds);
      return;
    }
    kept_weight_ = (kept_weight_.defined() ? kept_weight_.add(*weight_) : at::full({1}, *weight_, holds.options()));
    kept_weight_.mul_(holds);
    weight_ = 0;
    return;
  }
  const bool is_clean = holds.data_ptr<double>()[0] == 0;
  if (!is_clean && !weight_) throw UserError(kUncounted);
  if (is_clean) {
    weight_.reset();
    kept_weight_ = at::Tensor();
  }
}

// float64 [1]: 1 where any of the gradients has an element that is not 0, else 0. On the device where they are; on the
// CPU if there are none.
at::Tensor Reducer::hold_anything(const std::vector<at::Tensor>& grads) const {
  if (grads.empty()) return at::zeros({1}, at::kDouble);
  std::vector<at::Tensor> counts;
  for (const at::Tensor& grad : grads) {
    const at::Tensor values = grad.is_sparse() ? grad._values() : grad;
    counts.push_back(values.count_nonzero().to(params_[0].tensor.device(), /*non_blocking=*/true));
    if (counts.back().is_cpu() && counts.back().item<int64_t>() > 0) break;
  }
  return at::stack(counts).sum().gt(0).to(at::kDouble).view({1});
}

// What the device has found wrong in an earlier backward, as soon as the host hears of it.
void Reducer::check_late() {
  if (uncounted_.has_failed()) {
    forget_step();
    throw UserError(text(kUncounted, kWasLate));
  }
  if (unzeroed_.has_failed()) {
    forget_step();
    throw UserError(text(kUnweighted, kWasLate));
  }
}

void Reducer::end_weighted(bool failed) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  is_weighted_ = false;
  if (failed) {
    weight_.reset();
    kept_weight_ = at::Tensor();
  } else if (sync_ && step_ == Step::kIdle && steps_ == weighted_from_) {
    reduce_collected();  // other ranks take part, whether the loss came out of the wrapper's forward or not
  }
  for (Parameter& param : params_) param.weighted = seen_grad(param);
}

// Whether the gradients that weights count have been zeroed since the last weight; the first gradient of the backward
// after that, parameter `came`'s, is there. Of a device it is taken to be so until the host hears of the contrary.
bool Reducer::were_zeroed(size_t came) {
  std::vector<at::Tensor> grads;
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& grad = params_[i].tensor.grad();
    if (!grad.defined() || grad.unsafeGetTensorImpl() != params_[i].weighted.first) continue;
    if (i != came) grads.push_back(grad);
    if (i == came && params_.size() == 1) return false;
  }
  const at::Tensor holds = hold_anything(grads);
  if (holds.is_cpu()) return holds.data_ptr<double>()[0] == 0;
  unzeroed_.add(holds);
  return true;
}

void Reducer::fail_unweighted() const { throw_value_error(kUnweighted); }

// Makes the sum over ranks the mean over what all weights count. Weights are finite and not negative, so that a rank
// which has one above 0 knows the sum to be above 0; only a rank that has none must wait for it.
void Reducer::divide_by_weights() {
  const double factor = comm_hook_ ? comm_->size() : 1;  // a hook has divided by the number of ranks already
  if (weight_sum_.is_cpu() || !(*weight_ > 0)) {
    const double total = weight_sum_.cpu().data_ptr<double>()[0];
    if (!(total > 0)) {
      forget_step();
      throw_value_error(text("the weights given to backward(loss, weight=...) sum to ", total,
                             " over all ranks, expected a sum above 0."));
    }
    for (Bucket& bucket : buckets_) bucket.flat.mul_(as_scalar(factor / total));
    return;
  }
  const at::Tensor scale = at::full({1}, factor, weight_sum_.options()).div_(weight_sum_);
  for (Bucket& bucket : buckets_) scale_by(bucket.sparse ? bucket.flat._values() : bucket.flat, scale);
}

}  // namespace drivetrain::ddp
