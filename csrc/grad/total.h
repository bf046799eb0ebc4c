// The sums of chunks, added up in the order of lanes.h. Not for ISA-compiled files.
#pragma once

#include "grad/lanes.h"

namespace drivetrain::grad {

class Total {
 public:
  void add(double sum) { sums_[count_++ % kLanes] += sum; }

  // To be asked once.
  double get() {
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) sums_[lane] += sums_[lane + width];
    }
    return sums_[0];
  }

 private:
  int64_t count_ = 0;
  double sums_[kLanes] = {};
};

}  // namespace drivetrain::grad
