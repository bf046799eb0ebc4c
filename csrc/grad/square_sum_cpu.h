// A sum of squares on the CPU, in double: the same bits on every instruction set. Needs no torch header.
#pragma once

#include <cstdint>

#include "grad/lanes.h"

namespace drivetrain::grad {
namespace DRIVETRAIN_ISA {

class SquareSum {
 public:
  // Element i goes to lane i % kLanes (lanes.h), counted anew in every call.
  template <class T>
  void add(const T* values, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const double value = values[i + lane];
        sums_[lane] += value * value;
      }
    }
    for (int lane = 0; i < count; ++i, ++lane) {
      const double value = values[i];
      sums_[lane] += value * value;
    }
  }

  // To be asked once.
  double total() {
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) sums_[lane] += sums_[lane + width];
    }
    return sums_[0];
  }

 private:
  alignas(64) double sums_[kLanes] = {};
};

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::grad
