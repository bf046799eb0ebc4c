// Implements the sums of summation.h on CUDA: a warp's part of a chunk, and a block's part of the chunks' sums.
// Includes no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/block_cuda.cuh"
#include "formats/storage.h"
#include "formats/summation.h"

namespace drivetrain::formats {

static_assert(kLanes == 32);
constexpr int kQuad = kSlots / kLanes;  // neighboring slots of a thread
static_assert(kQuad == 4);

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x % kLanes); }

// Sums over the threads of a warp, which must all call it. The first thread gets the result.
__device__ inline double sum_of_lanes(double sum) {
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) sum += __shfl_down_sync(kAllLanes, sum, width);
  return sum;
}

// Sums a chunk's slots; this thread has the slots lane * kQuad + k. The first thread gets the result.
__device__ __forceinline__ double sum_of_slots(double (&slots)[kQuad]) {
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) slots[k] += __shfl_down_sync(kAllLanes, slots[k], width);
  }
#pragma unroll
  for (int half = kQuad / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) slots[k] += slots[k + half];
  }
  return slots[0];
}

// Converts neighboring values to double. GPUs other than those for data centers convert two floats per clock and
// multiprocessor, which takes longer than loading them. Integers build the doubles there, except in rare quads.
__device__ __forceinline__ void widen(const float (&values)[kQuad], double (&doubles)[kQuad]) {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
  const bool is_rare = true;
#else
  uint32_t least_less_one = 0xffffffffu, largest = 0;  // The smaller one ignores zeros.
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    const uint32_t magnitude = magnitude_bits(values[k]);
    // Both exponents are biased, and a double has 29 more bits of mantissa.
    const uint32_t high = magnitude == 0 ? 0 : (magnitude >> 3) + ((1023u - 127u) << 20);
    doubles[k] = bits_as<double>(static_cast<uint64_t>(high) << 32 | static_cast<uint64_t>(magnitude << 29));
    least_less_one = magnitude - 1 < least_less_one ? magnitude - 1 : least_less_one;
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool is_rare = least_less_one < 0x007fffffu || largest >= kInfinity;  // subnormal or not finite
#endif
  if (!is_rare) return;
#pragma unroll
  for (int k = 0; k < kQuad; ++k) doubles[k] = values[k];
}

// Adds the squares of neighboring values to one or two arrays of slots. A float's square is exact in double, so that
// fusing multiplication and addition changes no bit.
template <class... Slots>
__device__ __forceinline__ void add_squares(const float (&values)[kQuad], Slots&... slots) {
  double doubles[kQuad];
  widen(values, doubles);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) ((slots[k] = std::fma(doubles[k], doubles[k], slots[k])), ...);
}
template <class... Slots>
__device__ __forceinline__ void add_squares(const double (&values)[kQuad], Slots&... slots) {
#pragma unroll
  for (int k = 0; k < kQuad; ++k) ((slots[k] += values[k] * values[k]), ...);
}

// Sums value_of(i) for begin <= i < end. All threads of the warp call it and the first gets the result. Several loads
// are outstanding at once. Elements beyond the end add 0, which changes no sum of squares.
template <class ValueOf>
__device__ double sum_in_lanes(int64_t begin, int64_t end, ValueOf value_of) {
  constexpr int kUnroll = 16;
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

// Sums value_of(i) for 0 <= i < count, group by group. All kThreads threads of the block call it and the first gets the
// result.
template <int kThreads, class ValueOf>
__device__ double sum_in_groups(int64_t count, ValueOf value_of) {
  constexpr int kWarps = kThreads / kLanes;
  static_assert(kThreads % kLanes == 0 && kLanes % kWarps == 0, "a lane's groups must all be one warp's");
  __shared__ double lanes[kLanes];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kLanes;
  if (thread < kLanes) lanes[thread] = 0;
  __syncthreads();
  for (int64_t group = warp; group * kGroup < count; group += kWarps) {
    const int64_t begin = group * kGroup, end = count < begin + kGroup ? count : begin + kGroup;
    const double sum = sum_in_lanes(begin, end, value_of);
    if (lane_of_thread() == 0) lanes[group % kLanes] += sum;
  }
  __syncthreads();
  const double total = warp == 0 ? sum_of_lanes(lanes[thread]) : 0.0;
  __syncthreads();  // The next call overwrites the lanes.
  return total;
}

// Finds the last job whose `begin` is at most `position`. All threads of a warp search together: two rounds of loads
// for 1,000 jobs.
template <class Job>
__device__ int32_t last_from_in_warp(const Job* jobs, int32_t num_jobs, int64_t Job::* begin, int64_t position) {
  int32_t low = 0, count = num_jobs;
  while (count > 1) {
    const int32_t step = (count + kLanes - 1) / kLanes, offset = lane_of_thread() * step;
    const bool is_before = offset < count && jobs[low + offset].*begin <= position;
    const int32_t before = __popc(__ballot_sync(kAllLanes, is_before)), skipped = before > 0 ? (before - 1) * step : 0;
    low += skipped;
    count = count - skipped < step ? count - skipped : step;
  }
  return low;
}

}  // namespace drivetrain::formats
