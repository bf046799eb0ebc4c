// The checksum of replicas.h.
#include "ddp/replicas.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>

#include <cstdint>

#include "base/hash.h"
#include "base/transfer.h"

namespace drivetrain::ddp {
namespace {

at::Tensor values_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  return values.is_complex() ? at::view_as_real(values) : values;
}

// int64 [].
at::Tensor sum_of_bits(const at::Tensor& values) {
  const at::ScalarType bits = values.element_size() == 8   ? at::kLong
                              : values.element_size() == 4 ? at::kInt
                              : values.element_size() == 2 ? at::kShort
                                                           : at::kByte;
  return values.view(bits).sum(at::kLong);
}

// Each sum counts by an odd factor of its own, so that no change of one goes unseen.
at::Tensor hash_on_device(const std::vector<at::Tensor>& tensors) {
  constexpr int64_t kOdd = 0x1E3779B97F4A7C15;
  const c10::Device device = tensors[0].device();
  std::vector<at::Tensor> sums;
  for (const at::Tensor& tensor : tensors) {
    sums.push_back(sum_of_bits(values_of(tensor)).to(device, /*non_blocking=*/true));
  }
  const at::Tensor factors = at::arange(static_cast<int64_t>(sums.size()), at::kLong).mul(2).add(1).mul(kOdd);
  return at::stack(sums).mul(copied_to(factors, device)).sum();
}

}  // namespace

at::Tensor hash_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad_tracking;
  if (!tensors[0].is_cpu()) return hash_on_device(tensors);
  uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor values = values_of(tensor);
    hash = mix(hash, hash_bytes(values.const_data_ptr(), static_cast<int64_t>(values.nbytes())));
  }
  return at::scalar_tensor(static_cast<int64_t>(hash), at::kLong);
}

}  // namespace drivetrain::ddp
