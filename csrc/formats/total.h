// Adds the sums of chunks in the order of summation.h. Not for ISA-compiled files.
#pragma once

#include "formats/summation.h"

namespace drivetrain::formats {

class SumOfChunks {
 public:
  void add(double sum) {
    of_group_.add(sum);
    if (of_group_.count == kGroup) take_group();
  }

  // Returns the sum. May be called once.
  double get() {
    if (of_group_.count > 0) take_group();
    return of_groups_.total();
  }

 private:
  struct Lanes {
    int64_t count = 0;
    double sums[kLanes] = {};

    void add(double sum) { sums[count++ % kLanes] += sum; }
    double total() {
      for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
      }
      return sums[0];
    }
  };

  void take_group() {
    of_groups_.add(of_group_.total());
    of_group_ = {};
  }

  Lanes of_group_, of_groups_;
};

}  // namespace drivetrain::formats
