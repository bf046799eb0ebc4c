// Sums up what a step measures on CUDA, with the threads of a block, in an order that depends on sizes alone. Includes
// no torch header.
#pragma once

#include "formats/summation_cuda.cuh"
#include "formats/tile_cuda.cuh"
#include "optim/statistics.h"

namespace drivetrain::optim {

// The sums of one thread.
template <class T>
struct ThreadStatistics {
  double grad = 0, update = 0, param = 0;
  T largest = 0;
  int32_t not_finite = 0, changed = 0, lost = 0;

  __device__ __forceinline__ void add(T of_grad, T before, T after) {
    const double wide_grad = of_grad, wide_update = after - before, wide_param = before;
    grad += wide_grad * wide_grad;
    update += wide_update * wide_update;
    param += wide_param * wide_param;
    const T magnitude = of_grad < 0 ? -of_grad : of_grad;
    const bool is_finite = magnitude < static_cast<T>(INFINITY);
    not_finite += is_finite ? 0 : 1;
    largest = is_finite && magnitude > largest ? magnitude : largest;
  }

  // Compares an element's value before the step with the rule's result and with what is stored of it.
  __device__ __forceinline__ void compare(T before, T exact, T stored) {
    const int32_t changes = exact != before;
    changed += changes;
    lost += changes & static_cast<int32_t>(stored == before);
  }
};

template <class T>
__device__ ChunkStatistics joined(const ThreadStatistics<T>& of) {
  double largest = of.largest;
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) {
    const double other = __shfl_down_sync(kAllLanes, largest, width);
    largest = other > largest ? other : largest;
  }
  // Counts are exact in double.
  const auto count = [](int32_t value) { return static_cast<int64_t>(sum_of_lanes(value)); };
  return {sum_of_lanes(of.grad),  largest,           count(of.not_finite), sum_of_lanes(of.update),
          sum_of_lanes(of.param), count(of.changed), count(of.lost)};
}

// Writes the sums over all threads of the block, which must all call it.
template <class T>
__device__ void write(const ThreadStatistics<T>& of, ChunkStatistics& to) {
  __shared__ ChunkStatistics warps[kWarps];
  const ChunkStatistics of_warp = joined(of);
  if (lane_of_thread() == 0) warps[threadIdx.x / kLanes] = of_warp;
  __syncthreads();
  if (threadIdx.x != 0) return;
  ChunkStatistics sums = warps[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    const ChunkStatistics& other = warps[warp];
    sums.grad += other.grad;
    sums.largest = other.largest > sums.largest ? other.largest : sums.largest;
    sums.not_finite += other.not_finite;
    sums.update += other.update;
    sums.param += other.param;
    sums.changed += other.changed;
    sums.lost += other.lost;
  }
  to = sums;
}

}  // namespace drivetrain::optim
