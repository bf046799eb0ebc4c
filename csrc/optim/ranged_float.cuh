// A float for CUDA kernels whose division and square root take a few instructions and no branch. Both give IEEE's bits
// within the ranges below; a flag tells where a value left them, and the caller then computes again in plain float.
#pragma once

#include <cmath>

#include "optim/storage.h"

namespace drivetrain::optim {

// The hardware's approximations, wrong by an ulp or so. The tests define them for the CPU (cuda_on_cpu/).
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

// Right for 0 and from 2^-101 on, up to the largest finite float: the instructions of sqrtf without its range check.
__device__ __forceinline__ float square_root_in_range(float x) {
  const float reciprocal = fminf(approximate_reciprocal_root(x), 3.402823466e38f);  // infinite for 0
  const float root = x * reciprocal, half = 0.5f * reciprocal;
  return fmaf(fmaf(-root, root, x), half, root);
}
__device__ __forceinline__ bool is_root_in_range(float x) {
  constexpr uint32_t kSmallest = 26u << 23;  // 2^-101
  return x == 0 ? bits_as<uint32_t>(x) == 0 : bits_as<uint32_t>(x) - kSmallest < kInfinity - kSmallest;
}

// Right for divisors from 2^-100 to 2^24 and dividends that are 0 or from 2^-100 to 2^20 in magnitude.
__device__ __forceinline__ float quotient_in_range(float dividend, float divisor) {
  float reciprocal = approximate_reciprocal(divisor);
  reciprocal = fmaf(fmaf(-divisor, reciprocal, 1.0f), reciprocal, reciprocal);
  float quotient = dividend * reciprocal;
  quotient = fmaf(fmaf(-divisor, quotient, dividend), reciprocal, quotient);
  quotient = fmaf(fmaf(-divisor, quotient, dividend), reciprocal, quotient);
  // A negative zero stays one.
  return bits_as<float>(magnitude_bits(quotient) | (bits_as<uint32_t>(dividend) & 0x80000000u));
}
__device__ __forceinline__ bool is_divisor_in_range(float divisor) {
  constexpr uint32_t kSmallest = 27u << 23, kLargest = 151u << 23;  // 2^-100, 2^24
  return bits_as<uint32_t>(divisor) - kSmallest <= kLargest - kSmallest;
}
__device__ __forceinline__ bool is_dividend_in_range(float dividend) {
  constexpr uint32_t kSmallest = 27u << 23, kLargest = 147u << 23;  // 2^-100, 2^20
  const uint32_t magnitude = magnitude_bits(dividend);
  return magnitude == 0 || magnitude - kSmallest <= kLargest - kSmallest;
}

struct RangedFloat {
  float value;
  bool is_outside = false;  // of the ranges, somewhere on the way to this value

  __device__ __forceinline__ RangedFloat() : value(0) {}
  __device__ __forceinline__ RangedFloat(float x) : value(x) {}  // NOLINT: mixes with floats
  __device__ __forceinline__ RangedFloat(float x, bool outside) : value(x), is_outside(outside) {}

  friend __device__ __forceinline__ RangedFloat operator+(RangedFloat a, RangedFloat b) {
    return {a.value + b.value, a.is_outside || b.is_outside};
  }
  friend __device__ __forceinline__ RangedFloat operator-(RangedFloat a, RangedFloat b) {
    return {a.value - b.value, a.is_outside || b.is_outside};
  }
  friend __device__ __forceinline__ RangedFloat operator*(RangedFloat a, RangedFloat b) {
    return {a.value * b.value, a.is_outside || b.is_outside};
  }
  friend __device__ __forceinline__ RangedFloat operator/(RangedFloat a, RangedFloat b) {
    const bool is_outside = !is_dividend_in_range(a.value) || !is_divisor_in_range(b.value);
    return {quotient_in_range(a.value, b.value), a.is_outside || b.is_outside || is_outside};
  }
  friend __device__ __forceinline__ bool operator<(RangedFloat a, RangedFloat b) { return a.value < b.value; }
  friend __device__ __forceinline__ bool operator>(RangedFloat a, RangedFloat b) { return a.value > b.value; }
};

__device__ __forceinline__ RangedFloat square_root(RangedFloat x) {
  return {square_root_in_range(x.value), x.is_outside || !is_root_in_range(x.value)};
}

}  // namespace drivetrain::optim
