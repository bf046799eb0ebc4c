// Describes factors that values are multiplied by, one after the other. Needs no torch header.
#pragma once

#include <cstdint>

namespace drivetrain::formats {

// torch multiplies gradients in one pass per factor, and each pass rounds to their dtype. To have the same
// bits, a single pass applies the factors in this order and rounds every product as well.
struct Factors {
  static constexpr int kMost = 2;  // the inverse of a loss scale and a clipping coefficient
  double values[kMost] = {};
  int32_t count = 0;

  bool operator==(const Factors&) const = default;
};

}  // namespace drivetrain::formats
