// The checksum of replicas.h.
#include "ddp/replicas.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>

#include "base/hash.h"

namespace drivetrain::ddp {
namespace {

uint64_t sum_of_bits(const at::Tensor& tensor) {
  const at::ScalarType bits = tensor.element_size() == 8   ? at::kLong
                              : tensor.element_size() == 4 ? at::kInt
                              : tensor.element_size() == 2 ? at::kShort
                                                           : at::kByte;
  return static_cast<uint64_t>(tensor.view(bits).sum(at::kLong).item<int64_t>());
}

}  // namespace

int64_t hash_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad_tracking;
  uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors) {
    at::Tensor values = tensor.detach().contiguous();
    if (values.is_complex()) values = at::view_as_real(values);
    hash = mix(hash, values.is_cpu() ? hash_bytes(values.const_data_ptr(), static_cast<int64_t>(values.nbytes()))
                                     : sum_of_bits(values));
  }
  return static_cast<int64_t>(hash);
}

}  // namespace drivetrain::ddp
