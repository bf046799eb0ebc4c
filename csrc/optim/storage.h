// How a value lives in memory: the formats, and their conversion to and from the type that rules compute in.
// Host and device; needs no torch header.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define DT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DT_HOST_DEVICE inline
#endif

namespace drivetrain::optim {

enum class Format : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// One array of values in one format.
struct Stream {
  void* data;
  Format format;
};

#if defined(DRIVETRAIN_ISA)
// Inside the ISA-compiled files everything inline sits in a namespace of its own: otherwise the linker may keep
// the AVX-512 copy of a function for all three.
inline namespace DRIVETRAIN_ISA {
#endif

template <class To, class From>
DT_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

DT_HOST_DEVICE float float_from_bfloat16(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; NaN stays NaN (quiet, same sign and leading payload bits).
DT_HOST_DEVICE uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

// IEEE binary16 by integer and exact float arithmetic; the CPU's and GPU's instructions give the same bits.
DT_HOST_DEVICE float float_from_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  // Normal numbers: move exponent and mantissa into place and mend the exponent's bias by 112.
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t inf_or_nan = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x00400000u : 0u);
  // Subnormal: magnitude * 2^-24, exact in float.
  const uint32_t subnormal =
      bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-08f);
  const uint32_t result = magnitude >= 0x7c00u ? inf_or_nan : magnitude >= 0x0400u ? normal : subnormal;
  return bits_as<float>(sign | result);
}

// Round to nearest even; overflow to infinity; NaN stays NaN.
DT_HOST_DEVICE uint16_t float16_from_float(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  // Subnormal results: adding 0.5 leaves exactly the wanted bits, rounded to nearest even by the addition itself.
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t result = magnitude > 0x7f800000u    ? nan
                          : magnitude >= 0x47800000u ? 0x7c00u
                          : magnitude < 0x38800000u  ? subnormal
                                                     : normal;
  return static_cast<uint16_t>(sign | result);
}

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
