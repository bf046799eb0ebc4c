// Multiplies a tile of values by a factor on the CPU. Needs no torch header.
#pragma once

#include "formats/tile_cpu.h"

namespace drivetrain::formats {
inline namespace DRIVETRAIN_ISA {

// Rounds values to those that their storage format can represent.
template <class T>
void round_tile(Format format, T* values, int64_t count) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (format == Format::kBFloat16) {
      uint16_t halves[kTile];
      store_bfloat16(values, halves, count);
      load_bfloat16(halves, values, count);
    } else if (format == Format::kFloat16) {
      uint16_t halves[kTile];
      store_float16(values, halves, count);
      load_float16(halves, values, count);
    }
  }
}

// Multiplies a tile of an array of that format, and rounds the products to it.
template <class T>
void multiply_tile(Format format, double factor, T* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] *= T(factor);
  round_tile(format, values, count);
}

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::formats
