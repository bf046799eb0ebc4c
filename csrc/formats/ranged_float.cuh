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
// Also exact for 0. Returns NaN, infinity or a negative number where there is no finite root.
__device__ __forceinline__ float square_root_in_range(float x) {
  const float reciprocal = fminf(approximate_reciprocal_root(x), 3.402823466e38f);  // infinite for 0
  return root_from_reciprocal(x, reciprocal);
}

// Returns the magnitude with the other's sign, by the one instruction that the compiler would make two.
__device__ __forceinline__ float with_sign_of(float magnitude, float sign) {
#ifdef __CUDACC__
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, 0x7fffffff, 0xe4;"
      : "=r"(bits)
      : "r"(bits_as<uint32_t>(magnitude)), "r"(bits_as<uint32_t>(sign)));
  return bits_as<float>(bits);
#else
  return std::copysign(magnitude, sign);
#endif
}

// Exact for divisors from 2^-100 to 2^24, and dividends that are 0 or from 2^-100 to 2^20 in magnitude.
__device__ __forceinline__ float quotient_in_range(float dividend, float divisor) {
  float reciprocal = approximate_reciprocal(divisor);
  reciprocal = fmaf(fmaf(-divisor, reciprocal, 1.0f), reciprocal, reciprocal);
  float quotient = dividend * reciprocal;
  quotient = fmaf(fmaf(-divisor, quotient, dividend), reciprocal, quotient);
  quotient = fmaf(fmaf(-divisor, quotient, dividend), reciprocal, quotient);
  return with_sign_of(quotient, dividend);  // of a negative zero
}

// The range of all operands of divisions and roots so far, as bits of floats. Minima and maxima cost less than
// comparing each value, and use no predicates, of which there are few. The flags are known to the compiler, which
// would keep a minimum with the largest number.
struct MetRange {
  static constexpr uint32_t kSmallest = 27u << 23, kLargest = 147u << 23;  // 2^-100, 2^20
  uint32_t least_less_one = 0xffffffffu;                                   // ignores zeros
  uint32_t largest = 0;
  bool has_least = false, has_largest = false;

  __device__ __forceinline__ bool is_right() const {
    return (!has_least || least_less_one >= kSmallest - 1) && (!has_largest || largest <= kLargest);
  }
};
__device__ __forceinline__ uint32_t smaller_bits(uint32_t a, uint32_t b) { return a < b ? a : b; }
__device__ __forceinline__ uint32_t larger_bits(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ __forceinline__ MetRange joined(MetRange a, MetRange b) {
  MetRange result;
  result.has_least = a.has_least || b.has_least;
  result.has_largest = a.has_largest || b.has_largest;
  result.least_less_one = !a.has_least   ? b.least_less_one
                          : !b.has_least ? a.least_less_one
                                         : smaller_bits(a.least_less_one, b.least_less_one);
  result.largest = !a.has_largest ? b.largest : !b.has_largest ? a.largest : larger_bits(a.largest, b.largest);
  return result;
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
    const MetRange of_dividend = {dividend - 1, dividend, true, true};
    const MetRange of_divisor = {divisor, divisor, true, true};  // must not be 0
    return {quotient_in_range(a.value, b.value), joined(joined(a.met, b.met), joined(of_dividend, of_divisor))};
  }
  friend __device__ __forceinline__ bool operator<(RangedFloat a, RangedFloat b) { return a.value < b.value; }
  friend __device__ __forceinline__ bool operator>(RangedFloat a, RangedFloat b) { return a.value > b.value; }
};

// Where there is no finite root, the result is out of the range of divisors: rules must divide by it.
__device__ __forceinline__ RangedFloat square_root(RangedFloat x) {
  return {square_root_in_range(x.value), joined(x.met, {bits_as<uint32_t>(x.value) - 1, 0, true, false})};
}

}  // namespace drivetrain::formats
