// The checksum of replicas.h.
#include "ddp/replicas.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>

#include <cstring>

namespace drivetrain::ddp {
namespace {

constexpr uint64_t kPrime = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio: odd, bits well spread

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * kPrime;
  return hash ^ (hash >> 32);
}

uint64_t hash_bytes(const char* bytes, size_t count) {
  // Independent lanes, so that multiplications overlap.
  uint64_t lanes[4] = {1, 2, 3, 4};
  size_t i = 0;
  for (; i + sizeof(lanes) <= count; i += sizeof(lanes)) {
    uint64_t words[4];
    std::memcpy(words, bytes + i, sizeof(words));
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
  }
  uint64_t hash = count;
  for (uint64_t lane : lanes) hash = mix(hash, lane);
  for (; i < count; ++i) hash = mix(hash, static_cast<unsigned char>(bytes[i]));
  return hash;
}

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
    hash = mix(hash, values.is_cpu() ? hash_bytes(static_cast<const char*>(values.const_data_ptr()), values.nbytes())
                                     : sum_of_bits(values));
  }
  return static_cast<int64_t>(hash);
}

}  // namespace drivetrain::ddp
