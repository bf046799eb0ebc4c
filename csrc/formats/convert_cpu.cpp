// Converts values between storage formats on the CPU: compiled once per instruction set (DRIVETRAIN_ISA names the
// namespace), includes no torch header.
#include <cstring>

#include "formats/convert.h"
#include "formats/tile_cpu.h"

namespace drivetrain::formats::DRIVETRAIN_ISA {

void convert_cpu(const TypedArray& from, const TypedArray& to, int64_t numel, uint64_t key) {
  alignas(64) float scratch[kTile];
  for (int64_t i = 0; i < numel; i += kTile) {
    const int64_t count = numel - i < kTile ? numel - i : kTile;
    const float* values = load_tile(from, i, count, scratch);
    if (is_native<float>(to)) {
      memcpy(static_cast<float*>(to.data) + i, values, count * sizeof(float));
    } else {
      store_tile(to, i, count, values, key);
    }
  }
}

}  // namespace drivetrain::formats::DRIVETRAIN_ISA
