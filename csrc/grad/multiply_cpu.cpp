// Multiplies one chunk of a gradient: compiled once per instruction set (DRIVETRAIN_ISA names it), includes no torch
// header.
#include "formats/tile_cpu.h"
#include "grad/multiply.h"

namespace drivetrain::grad::DRIVETRAIN_ISA {
namespace {

bool is_finite(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, formats::magnitude_bits(values[i]));
  return largest < formats::kInfinity;
}

bool is_finite(const double* values, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= values[i] - values[i] == 0;
  return finite;
}

template <class T>
bool multiply_as(const formats::TypedArray& values, int64_t begin, int64_t end, double factor) {
  alignas(64) T scratch[formats::kTile];
  bool finite = true;
  for (int64_t i = begin; i < end; i += formats::kTile) {
    const int64_t count = std::min<int64_t>(end - i, formats::kTile);
    T* const tile = formats::load_tile(values, i, count, scratch);
    finite &= is_finite(tile, count);
    for (int64_t k = 0; k < count; ++k) tile[k] *= T(factor);
    formats::store_tile(values, i, count, tile);
  }
  return finite;
}

}  // namespace

bool multiply_cpu(const formats::TypedArray& values, int64_t begin, int64_t end, double factor) {
  return values.format == formats::Format::kFloat64 ? multiply_as<double>(values, begin, end, factor)
                                                    : multiply_as<float>(values, begin, end, factor);
}

}  // namespace drivetrain::grad::DRIVETRAIN_ISA
