// Defines a float for CUDA kernels whose division and square root take a few instructions and no branch. Both give
// IEEE's bits within the ranges below. A flag tells where a value left them, and the caller then computes again in
// plain float.
#pragma once

#include <cmath>

#include "formats/storage.h"

namespace drivetrain::formats {

// The hardware's approximations, with an error of about one ulp. The tests define them for the CPU (cuda_on_cpu/).
#ifdef __CUDACC__
__device__ __forceinline__ float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float approximate_reciprocal_root(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
#else
float approximate_reciprocal(float x);
float approximate_reciprocal_root(float x);
#endif

// Runs the instructions of sqrtf without its range check. Exact from 2^-101 up to the largest finite float.
__device__ __forceinline__ float root_from_reciprocal(float x, float reciprocal) {
  const float root = x * reciprocal, half = 0.5f * reciprocal;
  return fmaf(fmaf(-root, root, x), half, root);
}
__device__ __forceinline__ float square_root_of_positive(float x) {
  return root_from_reciprocal(x, approximate_reciprocal_root(x));
}
// Also exact for 0. Returns NaN where there is no finite root.
__device__ __forceinline__ float square_root_in_range(float x) {
  const float reciprocal = fminf(approximate_reciprocal_root(x), 3.402823466e38f);  // infinite for 0
  return root_from_reciprocal(x, reciprocal);
}

// Exact for divisors from 2^-100 to 2^24, and dividends that are 0 or from 2^-100 to 2^20 in magnitude.
__device__ __forceinline__ float quotient_in_range(float dividend, float divisor) {
  float reciprocal = approximate_reciprocal(divisor);
  reciprocal = fmaf(fmaf(-divisor, reciprocal, 1.0f), reciprocal, reciprocal);
  float quotient = dividend * reciprocal;
  quotient = fmaf(fmaf(-divisor, quotient, dividend), reciprocal, quotient);
  quotient = fmaf(fmaf(-divisor, quotient, dividend), reciprocal, quotient);
  // Keeps the sign of a negative zero.
  return bits_as<float>(magnitude_bits(quotient) | (bits_as<uint32_t>(dividend) & 0x80000000u));
}

// The range of all operands of divisions and roots so far, as bits of floats. Minima and maxima cost less than
// comparing each value, and use no predicates, of which there are few.
struct MetRange {
  static constexpr uint32_t kSmallest = 27u << 23, kLargest = 147u << 23;  // 2^-100, 2^20
  uint32_t least_less_one = 0xffffffffu;                                   // ignores zeros
  uint32_t largest = 0;

  __device__ __forceinline__ bool is_right() const { return least_less_one >= kSmallest - 1 && largest <= kLargest; }
};
__device__ __forceinline__ uint32_t smaller_bits(uint32_t a, uint32_t b) { return a < b ? a : b; }
__device__ __forceinline__ uint32_t larger_bits(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ __forceinline__ MetRange joined(MetRange a, MetRange b) {
  return {smaller_bits(a.least_less_one, b.least_less_one), larger_bits(a.largest, b.largest)};
}

struct RangedFloat {
  float value;
  MetRange met;  // of the operands that led to this value

  __device__ __forceinline__ RangedFloat() : value(0) {}
  __device__ __forceinline__ RangedFloat(float x) : value(x) {}  // NOLINT: mixes with floats
  __device__ __forceinline__ RangedFloat(float x, MetRange range) : value(x), met(range) {}

  friend __device__ __forceinline__ RangedFloat operator+(RangedFloat a, RangedFloat b) {
    return {a.value + b.value, joined(a.met, b.met)};
  }
  friend __device__ __forceinline__ RangedFloat operator-(RangedFloat a, RangedFloat b) {
    return {a.value - b.value, joined(a.met, b.met)};
  }
  friend __device__ __forceinline__ RangedFloat operator*(RangedFloat a, RangedFloat b) {
    return {a.value * b.value, joined(a.met, b.met)};
  }
  friend __device__ __forceinline__ RangedFloat operator/(RangedFloat a, RangedFloat b) {
    const uint32_t dividend = magnitude_bits(a.value), divisor = bits_as<uint32_t>(b.value);
    const MetRange of_dividend = {dividend - 1, dividend};
    const MetRange of_divisor = {divisor, divisor};  // must not be 0
    return {quotient_in_range(a.value, b.value), joined(joined(a.met, b.met), joined(of_dividend, of_divisor))};
  }
  friend __device__ __forceinline__ bool operator<(RangedFloat a, RangedFloat b) { return a.value < b.value; }
  friend __device__ __forceinline__ bool operator>(RangedFloat a, RangedFloat b) { return a.value > b.value; }
};

// The result is NaN where there is no finite root.
__device__ __forceinline__ RangedFloat square_root(RangedFloat x) {
  const float root = square_root_in_range(x.value);
  return {root, joined(x.met, {bits_as<uint32_t>(x.value) - 1, bits_as<uint32_t>(root)})};
}

}  // namespace drivetrain::formats
