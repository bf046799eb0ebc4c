// Loads and stores 4, 8 or 16 bytes of global memory in one instruction, for memory-bound kernels. Includes no torch
// header.
//
// The loads are volatile: the compiler neither splits one nor moves it behind the first use of another. Addresses must
// lie in global memory, which the compiler cannot infer for pointers from tables. They must be aligned to the access;
// the emulation in tests/native aborts on a misaligned address.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifndef __CUDACC__
#include <cstdlib>
#endif

namespace drivetrain {

// Bytes of the widest load or store of a thread.
constexpr int kWideBytes = 16;

__device__ inline bool is_aligned(const void* address, int bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Loads kWords words, 1, 2 or 4, in one instruction.
template <int kWords>
__device__ __forceinline__ void load_vector(const void* from, uint32_t* words) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
#ifdef __CUDA_ARCH__
  if constexpr (kWords == 4) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
  } else {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  }
#elif !defined(__CUDACC__)
  if (!is_aligned(from, 4 * kWords)) std::abort();
  std::memcpy(words, from, kWords * sizeof(uint32_t));
#endif
}

// Loads 16 bytes of shared memory again instead of keeping them in registers.
__device__ __forceinline__ void reload_shared(const void* from, uint32_t* words) {
#ifdef __CUDA_ARCH__
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))));
#elif !defined(__CUDACC__)
  if (!is_aligned(from, kWideBytes)) std::abort();
  std::memcpy(words, from, kWideBytes);
#endif
}

// Stores kWords words, 1, 2 or 4, in one instruction.
template <int kWords>
__device__ __forceinline__ void store_vector(void* to, const uint32_t* words) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
#ifdef __CUDA_ARCH__
  if constexpr (kWords == 4) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(words[0]) : "memory");
  }
#elif !defined(__CUDACC__)
  if (!is_aligned(to, 4 * kWords)) std::abort();
  std::memcpy(to, words, kWords * sizeof(uint32_t));
#endif
}

// Words of the widest access that divides kBytes.
template <int kBytes>
constexpr int kWidestWords = kBytes % 16 == 0  ? 4
                             : kBytes % 8 == 0 ? 2
                                               : 1;

// Loads kBytes, a multiple of 4, with as few instructions as their number allows.
template <int kBytes>
__device__ __forceinline__ void load_words(const void* from, uint32_t* words) {
  constexpr int kWords = kWidestWords<kBytes>;
#pragma unroll
  for (int i = 0; i < kBytes / 4; i += kWords) load_vector<kWords>(static_cast<const char*>(from) + 4 * i, words + i);
}
template <int kWords>
__device__ __forceinline__ void load_wide(const void* from, uint32_t (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0);
  if constexpr (kWords < 4) {
    load_vector<kWords>(from, words);
  } else {
    load_words<4 * kWords>(from, words);
  }
}

// Stores kBytes, a multiple of 4, with as few instructions as their number allows.
template <int kBytes>
__device__ __forceinline__ void store_words(void* to, const uint32_t* words) {
  constexpr int kWords = kWidestWords<kBytes>;
#pragma unroll
  for (int i = 0; i < kBytes / 4; i += kWords) store_vector<kWords>(static_cast<char*>(to) + 4 * i, words + i);
}
template <int kWords>
__device__ __forceinline__ void store_wide(void* to, const uint32_t (&words)[kWords]) {
  store_words<4 * kWords>(to, words);
}

// Loads a structure from the device's memory; its address and its size are multiples of 16 bytes.
template <class T>
__device__ __forceinline__ T load_aligned(const T* from) {
  static_assert(alignof(T) % kWideBytes == 0 && sizeof(T) % kWideBytes == 0 && std::is_trivially_copyable_v<T>);
  uint32_t words[sizeof(T) / 4];
  load_words<sizeof(T)>(from, words);
  T value;
  std::memcpy(&value, words, sizeof(T));
  return value;
}

// Loads the first `count` elements of kBytes bytes each, one by one, into the words that load_wide() would fill. The
// other elements become zeros.
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

// Stores the first `count` elements of kBytes bytes each, one by one.
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

// Returns element k of 2 bytes, or of 1, from words that load_wide() has filled.
__device__ __forceinline__ uint16_t half_of(const uint32_t* words, int k) {
  return static_cast<uint16_t>(words[k / 2] >> (16 * (k % 2)));
}
__device__ __forceinline__ uint8_t byte_of(const uint32_t* words, int k) {
  return static_cast<uint8_t>(words[k / 4] >> (8 * (k % 4)));
}

// Joins byte kByte of four words, or halves of two, into one word. The first argument fills the lowest bits.
template <int kByte>
__device__ __forceinline__ uint32_t four_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#ifdef __CUDACC__
  constexpr unsigned kPair = kByte | (kByte + 4) << 4;
  return __byte_perm(__byte_perm(a, b, kPair), __byte_perm(c, d, kPair), 0x5410);
#else
  const auto byte = [](uint32_t word) { return (word >> (8 * kByte)) & 255u; };
  return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
#endif
}
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  return __byte_perm(a, b, 0x5410);
#else
  return (a & 0xffffu) | b << 16;
#endif
}
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  return __byte_perm(a, b, 0x7632);
#else
  return a >> 16 | (b & 0xffff0000u);
#endif
}

}  // namespace drivetrain
