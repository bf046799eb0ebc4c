// Multiplies a tile of values by factors on the CPU. Needs no torch header.
#pragma once

#include "formats/factors.h"
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

// Multiplies a tile of an array of that format. `from` and `to` are the same or apart.
template <class T>
void multiply_tile(Format format, const Factors& factors, const T* from, T* to, int64_t count) {
  for (int32_t i = 0; i < factors.count; ++i) {
    const T factor = T(factors.values[i]);
    for (int64_t k = 0; k < count; ++k) to[k] = from[k] * factor;
    round_tile(format, to, count);
    from = to;
  }
}

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::formats
