// Sums the squares of one chunk: compiled once per instruction set (DRIVETRAIN_ISA names it), includes no torch header.
#include "formats/square_sum_cpu.h"
#include "formats/tile_cpu.h"
#include "grad/norm.h"

namespace drivetrain::grad::DRIVETRAIN_ISA {

double sum_of_squares_cpu(const formats::TypedArray& values, int64_t begin, int64_t end) {
  formats::SquareSum sum;
  if (values.format == formats::Format::kFloat64) {
    sum.add(static_cast<const double*>(values.data) + begin, end - begin);
  } else {
    alignas(64) float scratch[formats::kTile];
    for (int64_t i = begin; i < end; i += formats::kTile) {
      const int64_t count = end - i < formats::kTile ? end - i : formats::kTile;
      sum.add(formats::load_tile(values, i, count, scratch), count);
    }
  }
  return sum.total();
}

}  // namespace drivetrain::grad::DRIVETRAIN_ISA
