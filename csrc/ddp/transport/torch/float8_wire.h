// Declares float8 e5m2 values in blocks as they travel between hosts. Needs no torch header.
//
// A block on the wire is one byte followed by a code for each of up to kFloat8Block values. The byte is the exponent
// field of the largest finite magnitude as a float32, at least kLeastExponent. A value is its code's e5m2 number times
// the unit 2^(byte - 141). The largest magnitude is then below 2^15 units, so that it rounds to a finite number.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"

namespace drivetrain::ddp {

constexpr int64_t kFloat8Block = 256;
// A smaller one would make the unit subnormal, or its reciprocal infinite.
constexpr uint8_t kLeastExponent = 15;

constexpr int64_t float8_wire_bytes(int64_t numel) { return numel + (numel + kFloat8Block - 1) / kFloat8Block; }

// The kernels of one instruction set. Every instruction set gives the same bits. Rounding is to nearest even;
// infinities and NaN keep their place.
//
// errors: null, or the rounding error of each value in earlier calls, [numel]. It is added before rounding and replaced
// by the new rounding error, or by 0 where that is not finite.
struct Float8Wire {
  // `to` may begin where `values` do.
  void (*encode)(const float* values, float* errors, int64_t numel, uint8_t* to);
  // Takes the sum of all pieces in float32 in their order, and writes the rounded sum over the first num_outputs.
  void (*sum)(uint8_t* const* pieces, int num_pieces, int num_outputs, float* errors, int64_t numel);
  // `from` may begin where `to` does, or before.
  void (*decode)(const uint8_t* from, int64_t numel, float* to);
};

DT_PER_ISA(Float8Wire float8_wire())

}  // namespace drivetrain::ddp
