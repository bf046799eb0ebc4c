// Sums squares on the CPU, in double, with the same bits on every instruction set. Needs no torch header.
#pragma once

#include <cstdint>

#include "formats/summation.h"

namespace drivetrain::formats {
inline namespace DRIVETRAIN_ISA {

class SquareSum {
 public:
  // Adds element i to slot i % kSlots (summation.h); every call counts from 0.
  template <class T>
  void add(const T* values, int64_t count) {
    int64_t i = 0;
    for (; i + kSlots <= count; i += kSlots) {
      for (int slot = 0; slot < kSlots; ++slot) {
        const double value = values[i + slot];
        slots_[slot] += value * value;
      }
    }
    for (int slot = 0; i < count; ++i, ++slot) {
      const double value = values[i];
      slots_[slot] += value * value;
    }
  }

  // Returns the sum. May be called once.
  double total() {
    for (int width = kSlots / 2; width > 0; width /= 2) {
      for (int slot = 0; slot < width; ++slot) slots_[slot] += slots_[slot + width];
    }
    return slots_[0];
  }

 private:
  alignas(64) double slots_[kSlots] = {};
};

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::formats
