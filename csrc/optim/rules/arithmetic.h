// Implements the functions that several rules share, with the same bits on CPU and GPU. Needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/storage.h"
#include "optim/rules/hypers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace drivetrain::optim {

using namespace formats;

DT_BEGIN_ISA

DT_HOST_DEVICE float square_root(float x) { return sqrtf(x); }
DT_HOST_DEVICE double square_root(double x) { return sqrt(x); }
#if defined(__AVX512F__)
inline __m512 square_root(__m512 x) { return _mm512_sqrt_ps(x); }
#elif defined(__AVX2__)
inline __m256 square_root(__m256 x) { return _mm256_sqrt_ps(x); }
#endif

// Computes base to the power of a whole number by squaring: the same bits on CPU and GPU, unlike pow. Its relative
// error is at most exponent * 2^-53, far below the rounding of 1 - power wherever power is not negligible.
DT_HOST_DEVICE double power(double base, double exponent) {
  double result = 1;
  for (uint64_t rest = exponent >= 1 && exponent < 1e18 ? static_cast<uint64_t>(exponent) : 0; rest > 0; rest >>= 1) {
    if ((rest & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

// Computes a positive base to any power as exp(exponent * log(base)): the same bits on CPU and GPU. The relative error
// is about 2^-53 times the logarithm. Powers below 1e-307 count as 0, and those above 1e307 as infinite.
DT_HOST_DEVICE double real_power(double base, double exponent) {
  if (exponent == 0 || base == 1) return 1;
  if (!(base >= 2.2250738585072014e-308)) return base == 0 ? (exponent > 0 ? 0 : INFINITY) : NAN;
  if (base > 1.7976931348623157e308) return exponent > 0 ? INFINITY : 0;
  constexpr double kLog2 = 0.693147180559945309417;
  // base = mantissa * 2^shift, with a mantissa near 1, whose logarithm is 2 artanh((mantissa - 1) / (mantissa + 1)).
  const uint64_t bits = bits_as<uint64_t>(base);
  double shift = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  double mantissa = bits_as<double>((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
  if (mantissa > 1.4142135623730951) {
    mantissa *= 0.5;
    shift += 1;
  }
  const double ratio = (mantissa - 1) / (mantissa + 1), square = ratio * ratio;
  double series = 0;
  for (int k = 21; k > 0; k -= 2) series = series * square + 1.0 / k;
  const double logarithm = exponent * (2 * ratio * series + shift * kLog2);
  if (logarithm > 707) return INFINITY;
  if (!(logarithm > -707)) return 0;
  // exp(logarithm) is 2^whole * exp(rest), where |rest| is at most log(2) / 2.
  constexpr double kLog2Leading = 0x1.62e42feep-1, kLog2Rest = 0x1.a39ef35793c76p-33;
  constexpr double kRounds = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
  const double whole = (logarithm * (1 / kLog2) + kRounds) - kRounds;
  const double rest = (logarithm - whole * kLog2Leading) - whole * kLog2Rest;
  double exponential = 1;
  for (int k = 14; k > 0; --k) exponential = 1 + exponential * rest / k;
  return exponential * bits_as<double>(static_cast<uint64_t>(static_cast<int64_t>(whole) + 1023) << 52);
}

// Sets a scalar of the state to the value that its tensor can hold.
DT_HOST_DEVICE void set_scalar(Scalars& scalars, int which, double value) {
  scalars.value[which] = scalars.is_double[which] ? value : static_cast<float>(value);
}

// Interpolates as torch.lerp does, which has two forms: infinities become NaN under the same weights.
template <class T>
DT_HOST_DEVICE T interpolated(T from, T to, T weight) {
  return weight < T(0.5) ? from + weight * (to - from) : to - (to - from) * (T(1) - weight);
}

// Returns the absolute value, and NaN for NaN.
template <class T>
DT_HOST_DEVICE T magnitude_of(T x) {
  return x < 0 ? -x : x;
}

// Returns -1, 0 or 1, and NaN for NaN.
template <class T>
DT_HOST_DEVICE T sign_of(T x) {
  return x > 0 ? T(1) : x < 0 ? T(-1) : x;
}

// Returns the maximum and keeps NaN, as torch.maximum does.
template <class T>
DT_HOST_DEVICE T maximum(T a, T b) {
  return a != a || a > b ? a : b;
}

// Returns the minimum and keeps a NaN of the first argument.
template <class T>
DT_HOST_DEVICE T minimum(T a, T b) {
  return a >= b ? b : a;
}

DT_END_ISA

}  // namespace drivetrain::optim
