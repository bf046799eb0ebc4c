// A warp's part of the sums of lanes.h: each thread is a lane.
#pragma once

#include <cstdint>

#include "grad/lanes.h"

namespace drivetrain::grad {

static_assert(kLanes == 32);

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x % kLanes); }

// All threads of the warp call it with their sums; the first gets the sum of all.
__device__ inline double sum_of_lanes(double sum) {
  constexpr unsigned kAll = 0xffffffffu;
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) sum += __shfl_down_sync(kAll, sum, width);
  return sum;
}

// The sum of value_of(i) for begin <= i < end, in the first thread; all threads of the warp call it. Loads of several
// elements are under way at once, and what is beyond the end adds a 0, which changes no sum of squares.
template <class ValueOf>
__device__ double sum_in_lanes(int64_t begin, int64_t end, ValueOf value_of) {
  constexpr int kUnroll = 8;
  double sum = 0;
  for (int64_t base = begin + lane_of_thread(); base < end; base += kUnroll * kLanes) {
    double values[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t i = base + k * kLanes;
      values[k] = i < end ? value_of(i) : 0.0;
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) sum += values[k];
  }
  return sum_of_lanes(sum);
}

}  // namespace drivetrain::grad
