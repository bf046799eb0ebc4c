// Arrays of at most two values as one bit per element, the lowest bit of a byte first. Needs no torch header.
#pragma once

#include <cstdint>

#include "formats/storage.h"

namespace drivetrain::saved_tensors {

// The two, by their bits: -0.0 is another value than 0.0, and a NaN equals itself.
struct TwoValues {
  uint64_t bits[2];  // the second is the first as long as no other is known
  bool has_second() const { return bits[1] != bits[0]; }
};

constexpr int64_t kBitsBlock = 64;  // elements that are cut up in one piece

// Writes for each element in [begin, end), begin being a multiple of kBitsBlock, whether it is the second value; notes
// that where it is met first. False: there is a third, and what was written counts for nothing. One copy of both per
// instruction set.
namespace baseline {
bool pack_bits_cpu(const void* from, int element_size, int64_t begin, int64_t end, TwoValues& values, uint8_t* to);
void unpack_bits_cpu(const uint8_t* from, const TwoValues& values, int element_size, int64_t begin, int64_t end,
                     void* to);
}  // namespace baseline
namespace avx2 {
bool pack_bits_cpu(const void* from, int element_size, int64_t begin, int64_t end, TwoValues& values, uint8_t* to);
void unpack_bits_cpu(const uint8_t* from, const TwoValues& values, int element_size, int64_t begin, int64_t end,
                     void* to);
}  // namespace avx2
namespace avx512 {
bool pack_bits_cpu(const void* from, int element_size, int64_t begin, int64_t end, TwoValues& values, uint8_t* to);
void unpack_bits_cpu(const uint8_t* from, const TwoValues& values, int element_size, int64_t begin, int64_t end,
                     void* to);
}  // namespace avx512

}  // namespace drivetrain::saved_tensors
