// Declares the CPU kernels that pack arrays of at most two distinct values into bits, the first element in the lowest
// bit of a byte. Needs no torch header.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"
#include "formats/storage.h"

namespace drivetrain::saved_tensors {

// The two values, compared by their bits: -0.0 differs from 0.0, and a NaN equals itself.
struct TwoValues {
  uint64_t bits[2];  // both are equal until a second value is found
  bool has_second() const { return bits[1] != bits[0]; }
};

constexpr int64_t kBitsBlock = 64;  // elements that the kernels process at a time

// pack_bits_cpu writes one bit per element of [begin, end): whether it equals the second value. `begin` must be a
// multiple of kBitsBlock. Sets the second value when it finds the first element that differs. Returns false if there is
// a third value; the output is invalid then. Both functions exist once per instruction set.
DT_PER_ISA(bool pack_bits_cpu(const void* from, int element_size, int64_t begin, int64_t end, TwoValues& values,
                              uint8_t* to))
DT_PER_ISA(void unpack_bits_cpu(const uint8_t* from, const TwoValues& values, int element_size, int64_t begin,
                                int64_t end, void* to))

}  // namespace drivetrain::saved_tensors
