// Declares the CPU kernels that pack arrays of at most two distinct values into bits, and the arithmetic of packed
// bools. The first element is in the lowest bit of a byte. Needs no torch header.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"
#include "formats/storage.h"

namespace drivetrain::saved_tensors {

// The two values, compared by their bits: -0.0 differs from 0.0, and a NaN equals itself.
struct TwoValues {
  uint64_t bits[2];  // both are equal if there is no second value
};

DT_BEGIN_ISA

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

DT_END_ISA

constexpr int64_t kBitsBlock = 64;  // elements that the kernels process at a time

// pack_bits_cpu writes one bit per element of [begin, end): whether it equals the second value. `begin` must be a
// multiple of kBitsBlock. Returns false if there is a third value; the output is invalid then. Both functions exist
// once per instruction set.
DT_PER_ISA(bool pack_bits_cpu(const void* from, int element_size, int64_t begin, int64_t end, const TwoValues& values,
                              uint8_t* to))
DT_PER_ISA(void unpack_bits_cpu(const uint8_t* from, const TwoValues& values, int element_size, int64_t begin,
                                int64_t end, void* to))

}  // namespace drivetrain::saved_tensors
