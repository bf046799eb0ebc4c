// Loads and stores of 4, 8 and 16 bytes in one instruction, for kernels that memory bounds. Includes no torch header.
//
// They are volatile, so that the compiler neither moves a load behind the first use of another nor splits it. Addresses
// must be of global memory and aligned to the access: the emulation of tests/native stops where one is not.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef __CUDACC__
#include <cstdlib>
#endif

namespace drivetrain {

// A thread's share of one load of a warp that is as wide as a load can be.
constexpr int kWideBytes = 16;

__device__ inline bool is_aligned(const void* address, int bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

template <int kWords>
__device__ __forceinline__ void load_wide(const void* from, uint32_t (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0);
#ifdef __CUDA_ARCH__
  if constexpr (kWords == 1) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                   : "l"(static_cast<const char*>(from) + 4 * i));
    }
  }
#elif !defined(__CUDACC__)
  if (!is_aligned(from, kWords < 4 ? 4 * kWords : kWideBytes)) std::abort();
  std::memcpy(words, from, sizeof words);
#endif
}

template <int kWords>
__device__ __forceinline__ void store_wide(void* to, const uint32_t (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0);
#ifdef __CUDA_ARCH__
  if constexpr (kWords == 1) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(words[0]) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(static_cast<char*>(to) + 4 * i), "r"(words[i]),
                   "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3])
                   : "memory");
    }
  }
#elif !defined(__CUDACC__)
  if (!is_aligned(to, kWords < 4 ? 4 * kWords : kWideBytes)) std::abort();
  std::memcpy(to, words, sizeof words);
#endif
}

// The first `count` elements of kBytes bytes each, one by one, as load_wide puts them into words; the rest are zeros.
template <int kBytes, class Count, int kWords>
__device__ __forceinline__ void load_narrow(const void* from, Count count, uint32_t (&words)[kWords]) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8);
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = 0;
#pragma unroll
  for (int k = 0; k < 4 * kWords / kBytes; ++k) {
    if (k >= count) continue;
    if constexpr (kBytes == 8) {
      const uint64_t value = static_cast<const uint64_t*>(from)[k];
      words[2 * k] = static_cast<uint32_t>(value);
      words[2 * k + 1] = static_cast<uint32_t>(value >> 32);
    } else if constexpr (kBytes == 4) {
      words[k] = static_cast<const uint32_t*>(from)[k];
    } else if constexpr (kBytes == 2) {
      words[k / 2] |= static_cast<uint32_t>(static_cast<const uint16_t*>(from)[k]) << 16 * (k % 2);
    } else {
      words[k / 4] |= static_cast<uint32_t>(static_cast<const uint8_t*>(from)[k]) << 8 * (k % 4);
    }
  }
}

template <int kBytes, int kWords>
__device__ __forceinline__ void store_narrow(void* to, int64_t count, const uint32_t (&words)[kWords]) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8);
#pragma unroll
  for (int k = 0; k < 4 * kWords / kBytes; ++k) {
    if (k >= count) continue;
    if constexpr (kBytes == 8) {
      static_cast<uint64_t*>(to)[k] = static_cast<uint64_t>(words[2 * k + 1]) << 32 | words[2 * k];
    } else if constexpr (kBytes == 4) {
      static_cast<uint32_t*>(to)[k] = words[k];
    } else if constexpr (kBytes == 2) {
      static_cast<uint16_t*>(to)[k] = static_cast<uint16_t>(words[k / 2] >> 16 * (k % 2));
    } else {
      static_cast<uint8_t*>(to)[k] = static_cast<uint8_t>(words[k / 4] >> 8 * (k % 4));
    }
  }
}

// Elements as load_wide leaves them: the k-th of 2 bytes or of 1, in the lowest bits.
template <int kWords>
__device__ __forceinline__ uint16_t half_of(const uint32_t (&words)[kWords], int k) {
  return static_cast<uint16_t>(words[k / 2] >> 16 * (k % 2));
}
template <int kWords>
__device__ __forceinline__ uint8_t byte_of(const uint32_t (&words)[kWords], int k) {
  return static_cast<uint8_t>(words[k / 4] >> 8 * (k % 4));
}

}  // namespace drivetrain
