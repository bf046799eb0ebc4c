// Declares the packed storage formats of saved tensors: bits without loss, and bfloat16 and 8-bit codes with loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace drivetrain::saved_tensors {

enum class Packing {
  // Lossless: one bit per element, for tensors that have at most two distinct values, compared by their bits.
  kBits,
  // For float32, float64 and their complex dtypes: rounds to nearest even, and keeps NaN.
  kBFloat16,
  // For float32, bfloat16, float16 and their complex dtypes: the signed codes of formats/storage.h with a scale per 256
  // elements. Let s be the largest finite magnitude of the block, at least 2^-113. Then x is restored with an error of
  // at most sqrt(|x| s) / 126 + s / 63504, rounded to its dtype. Infinities and NaN are preserved.
  kInt8,
};

// The packed contents of a contiguous tensor.
struct Packed {
  Packing packing;
  at::ScalarType dtype;
  int64_t numel;
  at::Tensor bytes;
  // kBits: the two values, on the host; a bit of 0 stands for false in bool tensors, otherwise for the first element.
  // kInt8: the scales, on the device of the bytes. kBFloat16: undefined.
  at::Tensor extra;

  int64_t nbytes() const;
};

// Returns whether tensors of this dtype can be packed. For kBits, the values of the tensor decide in addition.
bool is_packable(at::ScalarType dtype, Packing packing);

// Packs a contiguous tensor of one dimension on the CPU's threads or on the current stream of its CUDA device. The host
// does not wait, and autograd does not record it. kBits returns nothing if the tensor has more than two values. On CUDA
// it returns nothing for dtypes other than bool, because the host would have to wait for the values. There a bool whose
// byte is not 0 counts as 1.
std::optional<Packed> pack(const at::Tensor& flat, Packing packing);

// Returns a contiguous tensor of one dimension on the original device.
at::Tensor unpack(const Packed& packed);

// Convert from and to the names "bits", "bfloat16" and "int8". An unknown name raises UserError.
Packing packing_of(const std::string& name);
const char* name_of(Packing packing);

}  // namespace drivetrain::saved_tensors
