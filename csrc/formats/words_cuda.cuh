// Loads and stores of a lane's consecutive bytes as 32-bit words: up to 16 bytes at once where they are aligned and all
// there, else element by element. The order in which a kernel asks for them is the order in which they are issued.
#pragma once

#include <cstdint>
#include <cstring>

namespace drivetrain::optim {

// kWords: 1, 2 or 4. The addresses are of global memory, which the compiler cannot know of pointers from tables.
template <int kWords>
__device__ __forceinline__ void load_vector(const char* from, uint32_t* words) {
#ifdef __CUDACC__
  if constexpr (kWords == 4) {
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
  } else {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  }
#else
  std::memcpy(words, from, kWords * sizeof(uint32_t));
#endif
}

// Loads again what has been loaded, instead of keeping it in registers: to the compiler, another thread of the block
// may have changed it. The nearest cache has it.
__device__ __forceinline__ void reload_vector(const char* from, uint32_t* words) {
#ifdef __CUDACC__
  asm volatile("ld.relaxed.cta.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
#else
  std::memcpy(words, from, 4 * sizeof(uint32_t));
#endif
}

template <int kWords>
__device__ __forceinline__ void store_vector(char* to, const uint32_t* words) {
#ifdef __CUDACC__
  if constexpr (kWords == 4) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(words[0]) : "memory");
  }
#else
  std::memcpy(to, words, kWords * sizeof(uint32_t));
#endif
}

template <int kBytes>
constexpr int kWidestWords = kBytes % 16 == 0  ? 4
                             : kBytes % 8 == 0 ? 2
                                               : 1;

// kBytes: a multiple of 4.
template <int kBytes>
__device__ __forceinline__ void load_words(const char* from, uint32_t* words) {
  constexpr int kWords = kWidestWords<kBytes>;
#pragma unroll
  for (int i = 0; i < kBytes / 4; i += kWords) load_vector<kWords>(from + 4 * i, words + i);
}

template <int kBytes>
__device__ __forceinline__ void store_words(char* to, const uint32_t* words) {
  constexpr int kWords = kWidestWords<kBytes>;
#pragma unroll
  for (int i = 0; i < kBytes / 4; i += kWords) store_vector<kWords>(to + 4 * i, words + i);
}

template <int kBytes>
__device__ __forceinline__ bool is_aligned(const char* address) {
  constexpr unsigned kAlignment = 4 * kWidestWords<kBytes>;
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address)) % kAlignment == 0;
}

// The first `count` of kNumber elements of kBytes each; the others become zeros.
template <int kBytes, int kNumber>
__device__ __forceinline__ void load_some(const char* from, int count, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kNumber * kBytes / 4; ++i) words[i] = 0;
#pragma unroll
  for (int k = 0; k < kNumber; ++k) {
    if (k >= count) continue;
    if constexpr (kBytes == 4) words[k] = reinterpret_cast<const uint32_t*>(from)[k];
    if constexpr (kBytes == 2) {
      words[k / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(from)[k]) << (16 * (k % 2));
    }
    if constexpr (kBytes == 1) {
      words[k / 4] |= static_cast<uint32_t>(reinterpret_cast<const uint8_t*>(from)[k]) << (8 * (k % 4));
    }
  }
}

template <int kBytes, int kNumber>
__device__ __forceinline__ void store_some(char* to, int count, const uint32_t* words) {
#pragma unroll
  for (int k = 0; k < kNumber; ++k) {
    if (k >= count) continue;
    if constexpr (kBytes == 4) reinterpret_cast<uint32_t*>(to)[k] = words[k];
    if constexpr (kBytes == 2)
      reinterpret_cast<uint16_t*>(to)[k] = static_cast<uint16_t>(words[k / 2] >> (16 * (k % 2)));
    if constexpr (kBytes == 1) reinterpret_cast<uint8_t*>(to)[k] = static_cast<uint8_t>(words[k / 4] >> (8 * (k % 4)));
  }
}

// A structure of the device's memory, 16 bytes at a time; both its address and its size are multiples of that.
template <class T>
__device__ __forceinline__ T load_aligned(const T* from) {
  static_assert(alignof(T) % 16 == 0 && sizeof(T) % 16 == 0 && std::is_trivially_copyable_v<T>);
  uint32_t words[sizeof(T) / 4];
  load_words<sizeof(T)>(reinterpret_cast<const char*>(from), words);
  T value;
  std::memcpy(&value, words, sizeof(T));
  return value;
}

// Two bfloat16 in a word, rounded to nearest even. A NaN may get other bits than the formats' own.
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

// Words made of parts of others, the first the lowest: byte kByte of four of them, or halves of two.
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

// Parts of words.
__device__ __forceinline__ uint16_t half_of(const uint32_t* words, int k) {
  return static_cast<uint16_t>(words[k / 2] >> (16 * (k % 2)));
}
__device__ __forceinline__ uint8_t byte_of(const uint32_t* words, int k) {
  return static_cast<uint8_t>(words[k / 4] >> (8 * (k % 4)));
}
// bfloat16 number k as a float's bits.
__device__ __forceinline__ uint32_t widened_bfloat16(const uint32_t* words, int k) {
  return k % 2 == 0 ? words[k / 2] << 16 : words[k / 2] & 0xffff0000u;
}

}  // namespace drivetrain::optim
