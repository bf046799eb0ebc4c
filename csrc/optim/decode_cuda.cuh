// Values of the formats of storage.h out of words as base/wide_cuda.cuh loads them. Includes no torch header.
#pragma once

#include <cstdint>

#include "base/wide_cuda.cuh"
#include "optim/storage.h"

namespace drivetrain::optim {

template <int kWords>
__device__ __forceinline__ double double_of(const uint32_t (&words)[kWords], int k) {
  return bits_as<double>(static_cast<uint64_t>(words[2 * k + 1]) << 32 | words[2 * k]);
}

template <int kWords>
__device__ __forceinline__ float bfloat16_of(const uint32_t (&words)[kWords], int k) {
  return bits_as<float>(k % 2 == 0 ? words[k / 2] << 16 : words[k / 2] & 0xffff0000u);
}

// The processor's instruction gives storage.h's bits.
template <int kWords>
__device__ __forceinline__ float float16_of(const uint32_t (&words)[kWords], int k) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half_of(words, k)));
  return value;
#else
  return float_from_float16(half_of(words, k));
#endif
}

// Neighboring values as split8() has them, their halves in words and their remainders in bytes. Without a branch for
// each: a NaN, which split8() treats otherwise, is looked for in all of them at once.
template <int kCount>
__device__ __forceinline__ void split8_into(const float (&values)[kCount], uint32_t (&halves)[kCount / 2],
                                            uint32_t (&bytes)[kCount / 4]) {
  static_assert(kCount % 4 == 0);
  bool has_nan = false;
#pragma unroll
  for (int k = 0; k < kCount; ++k) has_nan |= values[k] != values[k];
#pragma unroll
  for (int k = 0; k < kCount; k += 4) {
    uint32_t half[4], byte[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The last byte of the rounded bits is to be cut off: what it holds carries into nothing.
      const uint32_t bits = bits_as<uint32_t>(values[k + i]), rounded = bits + (0x7fu + ((bits >> 8) & 1u));
      half[i] = rounded + 0x8000u;
      byte[i] = rounded >> 8;
    }
    if (has_nan) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Split8 parts = split8(values[k + i]);
        half[i] = static_cast<uint32_t>(parts.half) << 16;
        byte[i] = static_cast<uint8_t>(parts.remainder);
      }
    }
    halves[k / 2] = half[0] >> 16 | (half[1] & 0xffff0000u);
    halves[k / 2 + 1] = half[2] >> 16 | (half[3] & 0xffff0000u);
    bytes[k / 4] = (byte[0] & 0xffu) | (byte[1] & 0xffu) << 8 | (byte[2] & 0xffu) << 16 | byte[3] << 24;
  }
}

}  // namespace drivetrain::optim
