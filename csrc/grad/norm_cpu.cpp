// One chunk's sum of squares: compiled once per instruction set (DRIVETRAIN_ISA names it), includes no torch header.
#include "grad/norm.h"
#include "optim/tile_cpu.h"

namespace drivetrain::grad::DRIVETRAIN_ISA {
namespace {

constexpr int kLanes = 32;  // sums under way: enough to hide the addition's latency on every instruction set

template <class T>
void add_squares(const T* values, int64_t count, double (&sums)[kLanes]) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      sums[lane] += value * value;
    }
  }
  for (int lane = 0; i < count; ++i, ++lane) {
    const double value = values[i];
    sums[lane] += value * value;
  }
}

}  // namespace

double sum_of_squares_cpu(const optim::Stream& values, int64_t begin, int64_t end) {
  alignas(64) double sums[kLanes] = {};
  if (values.format == optim::Format::kFloat64) {
    add_squares(static_cast<const double*>(values.data) + begin, end - begin, sums);
  } else {
    alignas(64) float scratch[optim::kTile];
    for (int64_t i = begin; i < end; i += optim::kTile) {
      const int64_t count = end - i < optim::kTile ? end - i : optim::kTile;
      add_squares(optim::load_tile(values, i, count, scratch), count, sums);
    }
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

}  // namespace drivetrain::grad::DRIVETRAIN_ISA
