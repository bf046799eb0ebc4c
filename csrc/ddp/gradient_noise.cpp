// Sums the squares of gradients before and after their reduction.
#include "ddp/gradient_noise.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "ddp/tensors.h"
#include "formats/storage_torch.h"
#include "grad/norm.h"

namespace drivetrain::ddp {

void GradientNoise::set_every(int64_t every) {
  every_ = every;
  first_ = collectives_.steps();
  last_.reset();
}

void GradientNoise::begin_step(BackwardKind kind, bool is_joining) {
  own_ = at::Tensor();
  const bool is_due = every_ > 0 && (collectives_.steps() - first_) % every_ == 0;
  if (!is_due || !is_plain_ || is_joining || kind != BackwardKind::kPrepared) return;
  own_ = at::zeros({1}, at::TensorOptions(at::kDouble).device(params_[0].tensor.device()));
}

at::Tensor GradientNoise::squares_of(const std::vector<size_t>& params) const {
  std::vector<grad::Gradient> on_host;
  std::vector<at::Tensor> others;
  for (size_t param : params) {
    const at::Tensor values = as_real(buffer_.region(param).view);
    if (values.numel() == 0) continue;
    if (values.is_cpu() && formats::format_of(values.scalar_type()) && formats::is_walkable(values)) {
      on_host.push_back({formats::array_of(values), values.numel()});
    } else {
      others.push_back(values);
    }
  }
  const auto options = at::TensorOptions(at::kDouble).device(params_[0].tensor.device());
  at::Tensor squares = at::full({1}, grad::sum_of_squares(on_host), options);
  if (!others.empty()) squares += at::stack(at::_foreach_norm(others, 2, at::kDouble)).square().sum();
  return squares;
}

void GradientNoise::add(const Bucket& bucket, double factor) {
  if (is_due()) own_.add_(squares_of(bucket.params), 1 / (factor * factor));
}

void GradientNoise::finish() {
  if (!is_due()) return;
  std::vector<size_t> all(params_.size());
  std::iota(all.begin(), all.end(), 0);
  last_ = Norms{collectives_.steps(), collectives_.comm().size(), at::cat({own_, squares_of(all)})};
}

void GradientNoise::reset() {
  SideSum::reset();
  own_ = at::Tensor();
}

}  // namespace drivetrain::ddp
