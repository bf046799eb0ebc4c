// Implements on the CPU the operators that torch has only for GPUs, because the stand-in runs every operator there.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace fake_aten {

namespace {

using at::Scalar;
using at::ScalarType;
using at::Tensor;

Tensor mm_to(const Tensor& self, const Tensor& mat2, ScalarType type) { return at::mm(self.to(type), mat2.to(type)); }
Tensor& mm_to_out(const Tensor& self, const Tensor& mat2, ScalarType type, Tensor& out) {
  return out.copy_(mm_to(self, mat2, type));
}
Tensor bmm_to(const Tensor& self, const Tensor& mat2, ScalarType type) { return at::bmm(self.to(type), mat2.to(type)); }
Tensor& bmm_to_out(const Tensor& self, const Tensor& mat2, ScalarType type, Tensor& out) {
  return out.copy_(bmm_to(self, mat2, type));
}
Tensor addmm_to(const Tensor& self, const Tensor& a, const Tensor& b, ScalarType type, const Scalar& beta,
                const Scalar& alpha) {
  return at::addmm(self.to(type), a.to(type), b.to(type), beta, alpha);
}
Tensor& addmm_to_out(const Tensor& self, const Tensor& a, const Tensor& b, ScalarType type, const Scalar& beta,
                     const Scalar& alpha, Tensor& out) {
  return out.copy_(addmm_to(self, a, b, type, beta, alpha));
}
Tensor baddbmm_to(const Tensor& self, const Tensor& a, const Tensor& b, ScalarType type, const Scalar& beta,
                  const Scalar& alpha) {
  return at::baddbmm(self.to(type), a.to(type), b.to(type), beta, alpha);
}
Tensor& baddbmm_to_out(const Tensor& self, const Tensor& a, const Tensor& b, ScalarType type, const Scalar& beta,
                       const Scalar& alpha, Tensor& out) {
  return out.copy_(baddbmm_to(self, a, b, type, beta, alpha));
}

// The following functions serve SyncBatchNorm. Channels are the second dimension.
Tensor by_channel(const Tensor& values, const Tensor& like) {
  std::vector<int64_t> sizes(static_cast<size_t>(like.dim()), 1);
  sizes[1] = values.numel();
  return values.view(sizes);
}
std::vector<int64_t> all_but_channels(const Tensor& tensor) {
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (i != 1) dims.push_back(i);
  }
  return dims;
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  const Tensor x = input.to(at::kFloat);
  const Tensor mean = x.mean(all_but_channels(x)), var = x.var(all_but_channels(x), /*unbiased=*/false);
  return {mean, (var + eps).rsqrt()};
}

Tensor batch_norm_elemt(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd, double) {
  Tensor x = (input.to(at::kFloat) - by_channel(mean, input)) * by_channel(invstd, input);
  if (weight.has_value() && weight->defined()) x = x * by_channel(*weight, input);
  if (bias.has_value() && bias->defined()) x = x + by_channel(*bias, input);
  return x.to(input.scalar_type());
}

std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(const Tensor& input, const Tensor& mean,
                                                               const Tensor& invstd,
                                                               const std::optional<Tensor>& running_mean,
                                                               const std::optional<Tensor>& running_var,
                                                               double momentum, double eps, const Tensor& counts) {
  const Tensor n = counts.to(mean.scalar_type()).view({-1, 1}), total = n.sum();
  const Tensor all_mean = (mean * n).sum(0) / total;
  const Tensor var_sum = ((invstd.pow(-2) - eps + (mean - all_mean).square()) * n).sum(0);
  if (running_mean.has_value() && running_mean->defined()) {
    Tensor(*running_mean).mul_(1 - momentum).add_(all_mean.to(running_mean->scalar_type()), momentum);
  }
  if (running_var.has_value() && running_var->defined()) {
    Tensor(*running_var).mul_(1 - momentum).add_((var_sum / (total - 1)).to(running_var->scalar_type()), momentum);
  }
  return {all_mean, (var_sum / total + eps).rsqrt()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad_out, const Tensor& input,
                                                                      const Tensor& mean, const Tensor& invstd,
                                                                      const std::optional<Tensor>&, bool needs_input,
                                                                      bool needs_weight, bool needs_bias) {
  const Tensor grad = grad_out.to(at::kFloat), x = input.to(at::kFloat);
  const auto dims = all_but_channels(input);
  const Tensor sum_dy = grad.sum(dims), sum_dy_xmu = (grad * (x - by_channel(mean, input))).sum(dims);
  return {needs_input ? sum_dy : Tensor(), needs_input ? sum_dy_xmu : Tensor(),
          needs_weight ? sum_dy_xmu * invstd : Tensor(), needs_bias ? sum_dy.clone() : Tensor()};
}

Tensor batch_norm_backward_elemt(const Tensor& grad_out, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                                 const std::optional<Tensor>& weight, const Tensor& sum_dy, const Tensor& sum_dy_xmu,
                                 const Tensor& count) {
  const Tensor total = count.sum().to(at::kFloat), x = input.to(at::kFloat) - by_channel(mean, input);
  const Tensor centered = grad_out.to(at::kFloat) - by_channel(sum_dy / total, input) -
                          x * by_channel(sum_dy_xmu / total * invstd.square(), input);
  Tensor factor = by_channel(invstd, input);
  if (weight.has_value() && weight->defined()) factor = factor * by_channel(*weight, input);
  return (centered * factor).to(input.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("mm.dtype", TORCH_FN(mm_to));
  library.impl("mm.dtype_out", TORCH_FN(mm_to_out));
  library.impl("bmm.dtype", TORCH_FN(bmm_to));
  library.impl("bmm.dtype_out", TORCH_FN(bmm_to_out));
  library.impl("addmm.dtype", TORCH_FN(addmm_to));
  library.impl("addmm.dtype_out", TORCH_FN(addmm_to_out));
  library.impl("baddbmm.dtype", TORCH_FN(baddbmm_to));
  library.impl("baddbmm.dtype_out", TORCH_FN(baddbmm_to_out));
  library.impl("batch_norm_stats", TORCH_FN(batch_norm_stats));
  library.impl("batch_norm_elemt", TORCH_FN(batch_norm_elemt));
  library.impl("batch_norm_gather_stats_with_counts", TORCH_FN(batch_norm_gather_stats_with_counts));
  library.impl("batch_norm_backward_reduce", TORCH_FN(batch_norm_backward_reduce));
  library.impl("batch_norm_backward_elemt", TORCH_FN(batch_norm_backward_elemt));
}

}  // namespace

}  // namespace fake_aten
