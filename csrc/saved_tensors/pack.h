// Smaller forms of what autograd saves: bits without loss, bfloat16 and 8-bit codes for those who choose to lose some.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace drivetrain::saved_tensors {

enum class Packing {
  kBits,      // no loss: one bit per element of a tensor that has at most two values, by their bits
  kBFloat16,  // of float32, float64 and their complex numbers: rounded to nearest even; NaN stays NaN
  // Of float32, bfloat16, float16 and their complex numbers: the optimizers' signed codes (formats/storage.h) with a
  // scale per 256 of them. With s, the largest finite magnitude of the block or 2^-113 if that is more, x comes back
  // within sqrt(|x| s) / 126 + s / 63504, rounded to its dtype; infinities and NaN stay what and where they are.
  kInt8,
};

// What is kept instead of a contiguous tensor.
struct Packed {
  Packing packing;
  at::ScalarType dtype;
  int64_t numel;
  at::Tensor bytes;
  // Of kBits the two values, on the host: what a bit of 0 stands for (of bools false, else the first element) and what
  // a bit of 1 does. Of kInt8 the scales, beside the bytes. Else undefined.
  at::Tensor extra;

  int64_t nbytes() const;
};

// Whether tensors of this dtype can have that form; of kBits only those with two values do then.
bool is_packable(at::ScalarType dtype, Packing packing);

// What `Packed` holds, known before it is there.
int64_t packed_bytes(at::ScalarType dtype, int64_t numel, Packing packing);

// On the CPU's threads or on the device's current stream; the host does not wait for it, and autograd does not see it.
// kBits: nothing if there are more than two values, at the cost of reading until the third, and nothing on CUDA for
// other dtypes than bool: to find the values, the host would have to wait. There, a bool that is not 0 counts as 1.
std::optional<Packed> pack(const at::Tensor& flat, Packing packing);

// One dimension, contiguous, on the device it came from.
at::Tensor unpack(const Packed& packed);

// "bits", "bfloat16", "int8".
Packing packing_of(const std::string& name);
const char* name_of(Packing packing);

}  // namespace drivetrain::saved_tensors
