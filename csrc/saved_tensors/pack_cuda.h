// What packing enqueues on a CUDA stream (a cudaStream_t), and the arithmetic of its bits. Needs no torch header.
#pragma once

#include <cstdint>

#include "formats/storage.h"

namespace drivetrain::saved_tensors {

// Bools as bits, the lowest of a byte first, and back: the CPU's of 0 and 1 (activation/bits.h).
void pack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream);
void unpack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream);

// From one stream into another: float32 or float64 into bfloat16, float32 or 16 bits into signed codes, and back.
void convert_cuda(const formats::TypedArray& from, const formats::TypedArray& to, int64_t numel, void* stream);

// Of eight bools, the first in the lowest byte: one that is not 0 counts as 1.
DT_HOST_DEVICE uint8_t bits_of_bools(uint64_t bools) {
  const uint64_t below =
      (bools & 0x7f7f7f7f7f7f7f7fu) + 0x7f7f7f7f7f7f7f7fu;  // a byte's highest bit: if one below is set
  const uint64_t each = (below | bools) >> 7 & 0x0101010101010101u;
  return static_cast<uint8_t>(each * 0x0102040810204080u >> 56);  // each byte's bit meets its place in the highest byte
}

DT_HOST_DEVICE uint64_t bools_of_bits(uint8_t bits) {
  const uint64_t apart = bits * 0x0101010101010101u & 0x8040201008040201u;  // of byte i, bit i
  return (apart + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

}  // namespace drivetrain::saved_tensors
