// Accumulates one range of a gradient: compiled once per instruction set (DRIVETRAIN_ISA names it), includes no torch
// header.
#include <algorithm>

#include "formats/tile_cpu.h"
#include "grad/add_micro_grad.h"

namespace drivetrain::grad::DRIVETRAIN_ISA {

void accumulate_cpu(const Addition& addition, int64_t begin, int64_t end) {
  alignas(64) float of_main[formats::kTile], of_micro[formats::kTile];
  for (int64_t i = begin; i < end; i += formats::kTile) {
    const int64_t count = std::min<int64_t>(end - i, formats::kTile);
    const float* added = formats::load_tile(addition.micro, i, count, of_micro);
    if (addition.starts) {
      if (formats::is_native<float>(addition.main)) {
        std::copy_n(added, count, static_cast<float*>(addition.main.data) + i);
      } else {
        formats::store_tile(addition.main, i, count, added);
      }
      continue;
    }
    float* sum = formats::load_tile(addition.main, i, count, of_main);
    for (int64_t k = 0; k < count; ++k) sum[k] += added[k];
    formats::store_tile(addition.main, i, count, sum);
  }
}

}  // namespace drivetrain::grad::DRIVETRAIN_ISA
