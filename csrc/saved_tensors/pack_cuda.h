// Declares the launches of packing kernels on a CUDA stream (a cudaStream_t), and the arithmetic of packed bools. Needs
// no torch header.
#pragma once

#include <cstdint>

#include "formats/storage.h"

namespace drivetrain::saved_tensors {

// Pack bools into bits, the first in the lowest bit of a byte, and back. The layout is the CPU's of the values 0 and 1;
// see saved_tensors/bits.h.
void pack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream);
void unpack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream);

// Converts an array: float32 or float64 to bfloat16, float32 or 16-bit floats to signed codes, and back.
void convert_cuda(const formats::TypedArray& from, const formats::TypedArray& to, int64_t numel, void* stream);

// Packs eight bools, the first in the lowest byte. A byte that is not 0 counts as 1.
DT_HOST_DEVICE uint8_t bits_of_bools(uint64_t bools) {
  const uint64_t below =
      (bools & 0x7f7f7f7f7f7f7f7fu) + 0x7f7f7f7f7f7f7f7fu;  // sets the highest bit of a byte if a lower one is set
  const uint64_t each = (below | bools) >> 7 & 0x0101010101010101u;
  return static_cast<uint8_t>(each * 0x0102040810204080u >> 56);  // moves the bit of each byte into the highest byte
}

DT_HOST_DEVICE uint64_t bools_of_bits(uint8_t bits) {
  const uint64_t apart = bits * 0x0101010101010101u & 0x8040201008040201u;  // keeps bit i in byte i
  return (apart + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

}  // namespace drivetrain::saved_tensors
