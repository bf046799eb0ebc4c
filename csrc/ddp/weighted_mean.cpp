// Keeps the weights of a step's gradients and divides their sums by the sum of weights.
#include "ddp/weighted_mean.h"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/stream_order.h"
#include "ddp/bucket_queue.h"
#include "ddp/errors.h"
#include "ddp/tensors.h"

namespace drivetrain::ddp {
namespace {

constexpr const char* kUncounted =
    "backward(loss, weight=...) found gradients that no weight counts: from an earlier synchronized backward, from a "
    "backward without weight, or from one that raised. Call optimizer.zero_grad() first.";
constexpr const char* kUnweighted =
    "this backward has no weight, but the gradients that it adds to were given with backward(loss, weight=...). Give "
    "every backward of an accumulation a weight, or call optimizer.zero_grad() first.";
constexpr const char* kWeightInCapture =
    "backward(loss, weight=...) cannot be captured into a CUDA graph, which would repeat this weight. Capture the "
    "forward pass alone, or scale the loss and call loss.backward().";
constexpr const char* kWasLate =
    " It was an earlier backward, whose gradients are wrong: the device found it, and the host does not wait for that.";

constexpr const char* kParted =
    "drivetrain: the ranks ran different backwards: some backward(loss, weight=...) after a forward, others again over "
    "its outputs, or over outputs of a forward under no_sync()";
constexpr const char* kEqualBackwards =
    "Every rank must run the same forwards and backwards. The replicas may differ: load the last checkpoint.";

}  // namespace

void scale_by(const at::Tensor& values, const at::Tensor& factor) {
  // torch multiplies two tensors without dimensions in the wider type.
  const at::Tensor real = values.dim() == 0 ? as_real(values).unsqueeze(0) : as_real(values);
  const at::Tensor here = factor.to(real.device(), /*non_blocking=*/true);
  if (real.element_size() > 2) {
    real.mul_(here.squeeze());
    return;
  }
  // torch rounds a tensor of one element to the 16-bit type before it multiplies.
  at::Tensor not_finite = at::zeros({1}, here.options().dtype(at::kFloat));
  at::_amp_foreach_non_finite_check_and_unscale_({real}, not_finite, here.to(at::kFloat));
}

WeightedMean::WeightedMean(const Parameters& params, const PartSums& part_sums, Collectives& collectives,
                           std::function<void()> forget_step)
    : SideSum(collectives, Purpose::kWeights, "the weights"),
      params_(params),
      part_sums_(part_sums),
      forget_step_(std::move(forget_step)),
      seen_(params.size()) {}

WeightedMean::Seen WeightedMean::see_grad(const Parameter& param) {
  const at::Tensor& grad = param.tensor.grad();
  if (!grad.defined()) return {nullptr, 0};
  return {grad.unsafeGetTensorImpl(), grad._version()};
}

void WeightedMean::begin(double weight, const Holds& holds) {
  if (is_capturing_on(params_[0].tensor.device())) throw UnsupportedError(kWeightInCapture);
  check_late();
  bool is_untouched = true;
  for (size_t i = 0; i < params_.size() && is_untouched; ++i) is_untouched = seen_[i] == see_grad(params_[i]);
  // Reads gradients only if something has written to them since the last weight.
  if (!has_owner_ && (!weight_ || !is_untouched)) forget_zeroed_weights();
  holds_ = holds;
  total_ = {};
  weight_ = weight_.value_or(0) + weight;
  is_weighted_ = true;
  begun_in_ = collectives_.steps();
}

void WeightedMean::end(bool failed) {
  is_weighted_ = false;
  if (failed) forget_weights();
}

void WeightedMean::note_gradients() {
  for (size_t i = 0; i < params_.size(); ++i) seen_[i] = see_grad(params_[i]);
}

void WeightedMean::forget_weights() {
  weight_.reset();
  kept_weight_ = at::Tensor();
}

double WeightedMean::take() {
  if (!weight_) throw UserError(kUncounted);
  const double kept = kept_weight_.defined() ? kept_weight_.item<double>() : 0;  // after writes between backwards
  const double weight = *weight_ + kept;
  forget_weights();
  return weight;
}

void WeightedMean::forget_zeroed_weights() {
  std::vector<at::Tensor> grads;
  for (const Parameter& param : params_) {
    if (param.tensor.grad().defined()) grads.push_back(param.tensor.grad());
  }
  const at::Tensor nonzero = any_nonzero(grads);
  if (!nonzero.is_cpu()) {
    if (!weight_) {
      uncounted_.add(nonzero);
      return;
    }
    kept_weight_ = (kept_weight_.defined() ? kept_weight_.add(*weight_) : at::full({1}, *weight_, nonzero.options()));
    kept_weight_.mul_(nonzero);
    weight_ = 0;
    return;
  }
  const bool is_clean = nonzero.data_ptr<double>()[0] == 0;
  if (!is_clean && !weight_) throw UserError(kUncounted);
  if (is_clean) forget_weights();
}

// Returns float64 [1]: 1 if a gradient has a nonzero element, else 0. It lies on the gradients' device, or on the CPU
// if there are none.
at::Tensor WeightedMean::any_nonzero(const std::vector<at::Tensor>& grads) const {
  if (grads.empty()) return at::zeros({1}, at::kDouble);
  std::vector<at::Tensor> counts;
  for (const at::Tensor& grad : grads) {
    const at::Tensor values = grad.is_sparse() ? grad._values() : grad;
    counts.push_back(values.count_nonzero().to(params_[0].tensor.device(), /*non_blocking=*/true));
    if (counts.back().is_cpu() && counts.back().item<int64_t>() > 0) break;
  }
  return at::stack(counts).sum().gt(0).to(at::kDouble).view({1});
}

void WeightedMean::check_late() {
  if (uncounted_.has_failed()) {
    forget_step_();
    throw UserError(text(kUncounted, kWasLate));
  }
  if (unzeroed_.has_failed()) {
    forget_step_();
    throw UserError(text(kUnweighted, kWasLate));
  }
  if (parted_.has_failed()) {
    forget_step_();
    throw EnvironmentError(text(kParted, ". ", kEqualBackwards, kWasLate));
  }
}

void WeightedMean::check_unweighted(size_t came) {
  if (!were_zeroed(came)) throw_value_error(kUnweighted);
  forget_weights();
}

// On a device, takes the gradients to have been zeroed until the host knows that they were not.
bool WeightedMean::were_zeroed(size_t came) {
  std::vector<at::Tensor> grads;
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& grad = params_[i].tensor.grad();
    if (!grad.defined() || grad.unsafeGetTensorImpl() != seen_[i].first) continue;
    if (i != came) grads.push_back(grad);
    if (i == came && params_.size() == 1) return false;
  }
  const at::Tensor nonzero = any_nonzero(grads);
  if (nonzero.is_cpu()) return nonzero.data_ptr<double>()[0] == 0;
  unzeroed_.add(nonzero);
  return true;
}

void WeightedMean::begin_step(BackwardKind kind, bool /*is_joining*/) {
  if (!weight_) return;
  const bool* const holds = std::get_if<bool>(&holds_);
  const std::vector<double> mine = {part_sums_.add_to(*weight_), kind == BackwardKind::kPrepared ? 1.0 : 0.0,
                                    kind == BackwardKind::kUnprepared ? 1.0 : 0.0,
                                    holds != nullptr && *holds ? 1.0 : 0.0};
  sum_ = copied_to(at::tensor(mine, at::kDouble), params_[0].tensor.device());
  if (kept_weight_.defined()) sum_.narrow(0, 0, 1).add_(kept_weight_);
  if (holds == nullptr) sum_.narrow(0, 3, 1).add_(std::get<at::Tensor>(holds_));
}

void WeightedMean::fail_parted(double prepared, double unprepared) {
  forget_step_();
  throw EnvironmentError(text(kParted, ". In synchronized step ", collectives_.steps(), ", ", prepared,
                              " of the ranks did the former, and ", unprepared, " the latter. ", kEqualBackwards));
}

// Weights are finite and not negative. A rank with a weight above 0 therefore knows that the sum is above 0, and only a
// rank without one must wait for it.
void WeightedMean::divide(const BucketQueue& queue, GradBuffer& buffer, double factor) {
  if (!weight_) return;
  const size_t count = buffer.buckets().size();
  if (has_owner_ && !sum_.is_cpu()) {
    parted_.add(sum_.narrow(0, 1, 1).mul(sum_.narrow(0, 2, 1)));
    total_ = at::stack({sum_[0], sum_[3]});
    return;
  }
  if (sum_.is_cpu() || !(*weight_ > 0)) {
    const at::Tensor on_host = sum_.cpu();
    const double* const sums = on_host.data_ptr<double>();
    if (sums[1] > 0 && sums[2] > 0) fail_parted(sums[1], sums[2]);
    if (has_owner_) {
      total_ = std::make_pair(sums[0], sums[3]);
      return;
    }
    if (!(sums[0] > 0)) {
      forget_step_();
      throw_value_error(text("the weights given to backward(loss, weight=...) sum to ", sums[0],
                             " over all ranks, expected a sum above 0."));
    }
    for (size_t i = 0; i < count; ++i) {
      if (!queue.is_divided(i)) buffer.bucket(i).flat.mul_(as_scalar(factor / sums[0]));
    }
    return;
  }
  parted_.add(sum_.narrow(0, 1, 1).mul(sum_.narrow(0, 2, 1)));
  const at::Tensor total = sum_.narrow(0, 0, 1);
  const at::Tensor scale = at::full({1}, factor, total.options()).div_(total);
  for (size_t i = 0; i < count; ++i) {
    const Bucket& bucket = buffer.bucket(i);
    scale_by(bucket.sparse ? bucket.flat._values() : bucket.flat, scale);
  }
}

}  // namespace drivetrain::ddp
