// Packs two distinct values into bits and back on the CPU. Compiled once per instruction set, which DRIVETRAIN_ISA
// names, and includes no torch header.
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstring>

#include "saved_tensors/bits.h"

namespace drivetrain::saved_tensors::DRIVETRAIN_ISA {
namespace {

// Returns the highest bits of 64 bytes.
inline uint64_t highest_bits(const uint8_t* bytes) {
#if defined(__AVX512BW__)
  return _mm512_movepi8_mask(_mm512_load_si512(bytes));
#elif defined(__AVX2__)
  const auto bits_at = [bytes](int at) -> uint64_t {
    const __m256i part = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes + at));
    return static_cast<uint32_t>(_mm256_movemask_epi8(part));
  };
  return bits_at(0) | bits_at(32) << 32;
#elif defined(__SSE2__)
  const auto bits_at = [bytes](int at) -> uint64_t {
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes + at))));
  };
  return bits_at(0) | bits_at(16) << 16 | bits_at(32) << 32 | bits_at(48) << 48;
#else
  uint64_t bits = 0, word;
  for (int i = 0; i < 64; i += 8) {
    std::memcpy(&word, bytes + i, sizeof word);
    // The product has the lowest bit of byte k at 56 + k.
    bits |= ((word >> 7 & 0x0101010101010101) * 0x0102040810204080 >> 56) << i;
  }
  return bits;
#endif
}

// Returns, for each element of a block, whether it differs from the first value. Sets `strange` to whether any element
// equals neither value.
template <class T>
inline uint64_t pack_block(const T* from, T first, T second, bool& strange) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 1) {
    const __m512i bytes = _mm512_loadu_si512(from);
    const __mmask64 is_other = _mm512_cmpneq_epi8_mask(bytes, _mm512_set1_epi8(first));
    strange = _mm512_mask_cmpneq_epi8_mask(is_other, bytes, _mm512_set1_epi8(second)) != 0;
    return is_other;
  }
#endif
  alignas(64) uint8_t is_other[kBitsBlock];
  T neither = 0;
  for (int i = 0; i < kBitsBlock; ++i) {
    is_other[i] = from[i] != first ? 0xff : 0;
    neither |= static_cast<T>(from[i] != first && from[i] != second);
  }
  strange = neither != 0;
  return highest_bits(is_other);
}

// Packs one block, and sets the second value if none is known. Returns false if there is a third.
template <class T>
inline bool pack_whole(const T* from, T first, T& second, uint64_t& bits) {
  bool strange = false;
  bits = pack_block(from, first, second, strange);
  if (!strange) return true;
  if (second != first) return false;
  second = from[__builtin_ctzll(bits)];
  bits = pack_block(from, first, second, strange);
  return !strange;
}

template <class T>
bool pack_elements(const T* from, int64_t begin, int64_t end, TwoValues& values, uint8_t* to) {
  const T first = static_cast<T>(values.bits[0]);
  T second = static_cast<T>(values.bits[1]);
  uint64_t bits = 0;
  int64_t i = begin;
  for (; i + kBitsBlock <= end; i += kBitsBlock) {
    if (!pack_whole(from + i, first, second, bits)) return false;
    std::memcpy(to + i / 8, &bits, sizeof bits);
  }
  if (i < end) {
    T rest[kBitsBlock];
    for (int64_t k = 0; k < kBitsBlock; ++k) rest[k] = i + k < end ? from[i + k] : first;
    if (!pack_whole(rest, first, second, bits)) return false;
    std::memcpy(to + i / 8, &bits, (end - i + 7) / 8);
  }
  values.bits[1] = second;
  return true;
}

template <class T>
inline void unpack_block(uint64_t bits, T first, T second, T* to) {
#if defined(__AVX512BW__)
  constexpr int kPerVector = 64 / sizeof(T);
  for (int i = 0; i < kBitsBlock; i += kPerVector, bits >>= kPerVector % 64) {
    __m512i vector;
    if constexpr (sizeof(T) == 1) {
      vector = _mm512_mask_blend_epi8(bits, _mm512_set1_epi8(first), _mm512_set1_epi8(second));
    } else if constexpr (sizeof(T) == 2) {
      vector =
          _mm512_mask_blend_epi16(static_cast<__mmask32>(bits), _mm512_set1_epi16(first), _mm512_set1_epi16(second));
    } else if constexpr (sizeof(T) == 4) {
      vector =
          _mm512_mask_blend_epi32(static_cast<__mmask16>(bits), _mm512_set1_epi32(first), _mm512_set1_epi32(second));
    } else {
      vector =
          _mm512_mask_blend_epi64(static_cast<__mmask8>(bits), _mm512_set1_epi64(first), _mm512_set1_epi64(second));
    }
    _mm512_storeu_si512(to + i, vector);
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 1) {
    const __m256i bytes = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i own_bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    for (int i = 0; i < kBitsBlock; i += 32, bits >>= 32) {
      const __m256i apart = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), bytes);
      const __m256i is_second = _mm256_cmpeq_epi8(_mm256_and_si256(apart, own_bit), own_bit);
      const __m256i vector = _mm256_blendv_epi8(_mm256_set1_epi8(first), _mm256_set1_epi8(second), is_second);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), vector);
    }
    return;
  }
#endif
  constexpr uint8_t kBits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  for (int byte = 0; byte < 8; ++byte) {
    const uint8_t of_byte = static_cast<uint8_t>(bits >> 8 * byte);
    for (int i = 0; i < 8; ++i) to[8 * byte + i] = (of_byte & kBits[i]) != 0 ? second : first;
  }
#endif
}

template <class T>
void unpack_elements(const uint8_t* from, const TwoValues& values, int64_t begin, int64_t end, T* to) {
  const T first = static_cast<T>(values.bits[0]), second = static_cast<T>(values.bits[1]);
  uint64_t bits = 0;
  int64_t i = begin;
  for (; i + kBitsBlock <= end; i += kBitsBlock) {
    std::memcpy(&bits, from + i / 8, sizeof bits);
    unpack_block(bits, first, second, to + i);
  }
  if (i < end) {
    T rest[kBitsBlock];
    bits = 0;
    std::memcpy(&bits, from + i / 8, (end - i + 7) / 8);
    unpack_block(bits, first, second, rest);
    std::memcpy(to + i, rest, (end - i) * sizeof(T));
  }
}

// Calls function(T()) with the unsigned integer type of that size.
template <class Function>
auto with_element(int size, const Function& function) {
  switch (size) {
    case 1:
      return function(uint8_t());
    case 2:
      return function(uint16_t());
    case 4:
      return function(uint32_t());
    default:
      return function(uint64_t());
  }
}

}  // namespace

bool pack_bits_cpu(const void* from, int element_size, int64_t begin, int64_t end, TwoValues& values, uint8_t* to) {
  return with_element(element_size, [&](auto element) {
    return pack_elements(static_cast<const decltype(element)*>(from), begin, end, values, to);
  });
}

void unpack_bits_cpu(const uint8_t* from, const TwoValues& values, int element_size, int64_t begin, int64_t end,
                     void* to) {
  with_element(element_size,
               [&](auto element) { unpack_elements(from, values, begin, end, static_cast<decltype(element)*>(to)); });
}

}  // namespace drivetrain::saved_tensors::DRIVETRAIN_ISA
