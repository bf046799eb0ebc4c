// Decodes values of storage formats from words that base/wide_cuda.cuh has loaded, and encodes them. Includes no torch
// header.
#pragma once

#include <cstdint>

#include "base/wide_cuda.cuh"
#include "formats/float8.h"
#include "formats/storage.h"

namespace drivetrain::formats {

template <int kWords>
__device__ __forceinline__ double double_of(const uint32_t (&words)[kWords], int k) {
  return bits_as<double>(static_cast<uint64_t>(words[2 * k + 1]) << 32 | words[2 * k]);
}

template <int kWords>
__device__ __forceinline__ float bfloat16_of(const uint32_t (&words)[kWords], int k) {
  return bits_as<float>(k % 2 == 0 ? words[k / 2] << 16 : words[k / 2] & 0xffff0000u);
}

// The processor's instruction gives the bits of storage.h.
__device__ __forceinline__ float float16_of(const uint32_t* words, int k) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half_of(words, k)));
  return value;
#else
  return float_from_float16(half_of(words, k));
#endif
}

// Packs two bfloat16 into a word, rounded to nearest even. A NaN may get other bits than storage.h's.
__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
#ifdef __CUDACC__
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  const auto rounded = [](float value) {
    return value != value ? uint16_t{0x7fff} : bfloat16_from_float(value);  // the hardware's NaN
  };
  return rounded(low) | (static_cast<uint32_t>(rounded(high)) << 16);
#endif
}

// As pack_bfloat16, for float16.
__device__ __forceinline__ uint32_t pack_float16(float low, float high) {
#ifdef __CUDACC__
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  const auto rounded = [](float value) {
    return value != value ? uint16_t{0x7fff} : float16_from_float(value);  // the hardware's NaN
  };
  return rounded(low) | (static_cast<uint32_t>(rounded(high)) << 16);
#endif
}

// Returns bfloat16 number k as the bits of a float.
__device__ __forceinline__ uint32_t widened_bfloat16(const uint32_t* words, int k) {
  return k % 2 == 0 ? words[k / 2] << 16 : words[k / 2] & 0xffff0000u;
}

// Return byte k as a number: it becomes the last byte of 2^23, which is then subtracted. That takes fewer instructions
// than a conversion.
__device__ __forceinline__ float unsigned_byte_of(const uint32_t* words, int k) {
#ifdef __CUDACC__
  return bits_as<float>(__byte_perm(words[k / 4], 0x4b000000u, 0x7440u + k % 4)) - 8388608.0f;
#else
  return byte_of(words, k);
#endif
}
__device__ __forceinline__ float signed_byte_of(const uint32_t* words, int k) {
#ifdef __CUDACC__
  return bits_as<float>(__byte_perm(words[k / 4] ^ 0x80808080u, 0x4b000000u, 0x7440u + k % 4)) - 8388736.0f;
#else
  return static_cast<int8_t>(byte_of(words, k));
#endif
}

// Returns the signed byte k times 256, as an unsigned number.
__device__ __forceinline__ uint32_t widened_byte(const uint32_t* words, int k) {
#ifdef __CUDACC__
  uint32_t result;  // its upper half repeats the byte's sign
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(words[k / 4]), "r"(0x8804u + 0x1110u * (k % 4)));
  return result;
#else
  return static_cast<uint32_t>(static_cast<int8_t>(byte_of(words, k)) * 256);
#endif
}

// Returns the number, which the compiler then computes once instead of merging what it is added to with what is added.
__device__ __forceinline__ uint32_t kept_as_is(uint32_t number) {
#ifdef __CUDACC__
  asm("" : "+r"(number));
#endif
  return number;
}

// Splits neighboring values as split8() does, into words of halves and of remainders. Without a branch per value: one
// check covers all of them for NaN, which split8() handles differently.
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
      // The last byte of the rounded bits is cut off and carries into nothing.
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

// Neighboring values of an array, as they lie in memory: the unit that a thread loads or stores at once.
template <Format kFormat, int kWidth>
struct Neighbors {
  static constexpr int kBytes = bytes_of(kFormat);
  static constexpr bool kHasByte = kFormat == Format::kBFloat16Remainder8;
  uint32_t words[kWidth * kBytes / 4];
  uint32_t extra[kHasByte ? kWidth / 4 : 1];

  // Elements [first, end) of the array. kIsWide: all of them exist and are aligned.
  template <bool kIsWide>
  __device__ __forceinline__ void load(const TypedArray& array, int64_t first, int64_t end) {
    const char* const from = static_cast<const char*>(array.data) + first * kBytes;
    if constexpr (kIsWide) {
      load_wide(from, words);
    } else {
      load_narrow<kBytes>(from, end - first, words);
    }
    if constexpr (kHasByte) {
      const char* const bytes = static_cast<const char*>(array.extra) + first;
      if constexpr (kIsWide) {
        load_wide(bytes, extra);
      } else {
        load_narrow<1>(bytes, end - first, extra);
      }
    }
  }

  template <bool kIsWide>
  __device__ __forceinline__ void store(const TypedArray& array, int64_t first, int64_t end) const {
    char* const to = static_cast<char*>(array.data) + first * kBytes;
    if constexpr (kIsWide) {
      store_wide(to, words);
    } else {
      store_narrow<kBytes>(to, end - first, words);
    }
    if constexpr (kHasByte) {
      char* const bytes = static_cast<char*>(array.extra) + first;
      if constexpr (kIsWide) {
        store_wide(bytes, extra);
      } else {
        store_narrow<1>(bytes, end - first, extra);
      }
    }
  }

  __device__ __forceinline__ float value(int k) const {
    if constexpr (kFormat == Format::kFloat64) {
      return static_cast<float>(double_of(words, k));
    } else if constexpr (kFormat == Format::kBFloat16) {
      return bfloat16_of(words, k);
    } else if constexpr (kFormat == Format::kFloat16) {
      return float16_of(words, k);
    } else if constexpr (kHasByte) {
      return join8(half_of(words, k), static_cast<int8_t>(byte_of(extra, k)));
    } else {
      static_assert(kFormat == Format::kFloat32);
      return bits_as<float>(words[k]);
    }
  }

  __device__ __forceinline__ void set(const float (&values)[kWidth]) {
    if constexpr (kHasByte) {
      split8_into(values, words, extra);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) set(k, values[k]);
    }
  }

 private:
  __device__ __forceinline__ void set(int k, float value) {
    if constexpr (kFormat == Format::kFloat64) {
      const auto bits = bits_as<uint64_t>(static_cast<double>(value));
      words[2 * k] = static_cast<uint32_t>(bits);
      words[2 * k + 1] = static_cast<uint32_t>(bits >> 32);
    } else if constexpr (kFormat == Format::kFloat32) {
      words[k] = bits_as<uint32_t>(value);
    } else {
      const uint32_t half = kFormat == Format::kBFloat16 ? bfloat16_from_float(value) : float16_from_float(value);
      words[k / 2] = k % 2 == 0 ? half : words[k / 2] | half << 16;
    }
  }
};

}  // namespace drivetrain::formats
