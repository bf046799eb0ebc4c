// Converts coded states and bfloat16 remainders on the CPU by vector code, with the bits of storage.h. Compilers narrow
// and widen these values with two to three times as many instructions. Needs no torch header.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "formats/float8.h"
#include "formats/storage.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace drivetrain::formats {
inline namespace DRIVETRAIN_ISA {

// Each function with a `count` converts whole vectors of elements and returns how many of `count` these are. The caller
// converts the others. Encoders take prepared finite values.

#if defined(__AVX512F__)
// Floats that a rule computes with at once, and as many integers. decode() returns the values of as many codes, as
// Kind::decode() does.
using Lanes = __m512;
using LaneWords = __m512i;
inline Lanes decode(const int8_t* codes, float unit) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const Lanes number = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  return number * _mm512_abs_ps(number) * unit;
}
inline Lanes decode(const uint8_t* codes, float unit) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const Lanes root = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)) * unit;
  return root * root;
}

// Returns roots of finite values in [0, 2^14) that round to the same integers as correctly rounded roots. It needs no
// square root instruction, whose unit is busy with the rule's roots and divisions. After two corrections the error does
// not depend on the estimate, which differs between processors: it is 2^-34 relative and one rounding. Smaller values
// than kLeast round to 0 in any case.
inline __m512 root_of_code(__m512 values) {
  constexpr float kLeast = 0x1p-20f;
  const __m512 estimate = _mm512_rsqrt14_ps(_mm512_max_ps(values, _mm512_set1_ps(kLeast)));
  const __m512 half = _mm512_mul_ps(estimate, _mm512_set1_ps(0.5f));
  __m512 root = _mm512_mul_ps(values, estimate);
  for (int i = 0; i < 2; ++i) root = _mm512_fmadd_ps(_mm512_fnmadd_ps(root, root, values), half, root);
  return root;
}

// Rounds finite magnitudes as Number::encode() does.
template <class Number>
__m512i float8_numbers(__m512 magnitudes) {
  const __m512i bits = _mm512_castps_si512(magnitudes);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, Number::kShift), _mm512_set1_epi32(1));
  constexpr int kHalf = (1 << (Number::kShift - 1)) - 1 - static_cast<int>(Number::kRebias);
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(kHalf)), odd);
  const __m512 rounding = _mm512_castsi512_ps(_mm512_set1_epi32(Number::kRounding));
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(magnitudes, rounding));
  const __mmask16 is_subnormal = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(Number::kSmallestNormal));
  return _mm512_mask_sub_epi32(_mm512_srli_epi32(rounded, Number::kShift), is_subnormal, sum,
                               _mm512_set1_epi32(Number::kRounding));
}

// Return the codes of 16 prepared values, one per word.
inline __m512i codes_of(const float* from, __m512 factor, SignedCode) {
  const __m512i sign = _mm512_set1_epi32(INT32_MIN), bits = _mm512_loadu_si512(from);
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_andnot_si512(sign, bits));
  const __m512 root = root_of_code(_mm512_mul_ps(magnitude, factor));
  const __m512i with_sign = _mm512_or_si512(_mm512_castps_si512(root), _mm512_and_si512(sign, bits));
  return _mm512_cvtps_epi32(_mm512_castsi512_ps(with_sign));
}

inline __m512i codes_of(const float* from, __m512 factor, SquaredCode) {
  const __m512 roots = _mm512_loadu_ps(from);
  const __m512i least = _mm512_min_epi32(_mm512_castps_si512(roots), _mm512_set1_epi32(1));  // 1 for positive roots
  return _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(roots, factor)), least);
}

inline __m512i codes_of(const float* from, __m512 factor, SignedFloat8) {
  const __m512i sign = _mm512_set1_epi32(INT32_MIN), bits = _mm512_loadu_si512(from);
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_andnot_si512(sign, bits));
  const __m512i numbers = float8_numbers<SignedFloat8::Number>(_mm512_mul_ps(magnitude, factor));
  return _mm512_or_si512(numbers, _mm512_srli_epi32(_mm512_and_si512(sign, bits), 24));
}

inline __m512i codes_of(const float* from, __m512 factor, SquaredFloat8) {
  const __m512 roots = _mm512_loadu_ps(from);
  const __mmask16 is_positive = _mm512_cmp_ps_mask(roots, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __m512i numbers = float8_numbers<SquaredFloat8::Number>(_mm512_mul_ps(roots, _mm512_mul_ps(roots, factor)));
  return _mm512_max_epi32(numbers, _mm512_maskz_set1_epi32(is_positive, 1));
}

template <class Kind>
int64_t encode_vectors(const float* from, float factor, typename Kind::Code* to, int64_t count) {
  constexpr int kWidth = 16;
  const __m512 factors = _mm512_set1_ps(factor);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const __m128i codes = _mm512_cvtepi32_epi8(codes_of(from + i, factors, Kind()));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), codes);
  }
  return i;
}

// Remainders are words here. The last byte is 0, or ignored, where they have 8 bits.
inline __m512i load_remainders(const int16_t* from) { return _mm512_loadu_si512(from); }
inline __m512i load_remainders(const int8_t* from) {
  return _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 8);
}
inline void store_remainders(__m512i words, int16_t* to) { _mm512_storeu_si512(to, words); }
inline void store_remainders(__m512i words, int8_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8)));
}

template <class Remainder>
int64_t join_vectors(const uint16_t* halves, const Remainder* remainders, float* to, int64_t count) {
  constexpr int kWidth = 32;
  const __m512i in_order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // The unpacking takes quarters of its operands.
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const __m512i half = _mm512_loadu_si512(halves + i), remainder = load_remainders(remainders + i);
    const __mmask32 is_zero = _mm512_testn_epi16_mask(half, _mm512_set1_epi16(0x7fff));
    const __m512i last = _mm512_mask_max_epi16(remainder, is_zero, remainder, _mm512_setzero_si512());  // none is stale
    const __m512i first = _mm512_add_epi16(half, _mm512_srai_epi16(last, 15));
    const __m512i firsts = _mm512_permutexvar_epi64(in_order, first), lasts = _mm512_permutexvar_epi64(in_order, last);
    _mm512_storeu_si512(to + i, _mm512_unpacklo_epi16(lasts, firsts));
    _mm512_storeu_si512(to + i + 16, _mm512_unpackhi_epi16(lasts, firsts));
  }
  return i;
}

// Rounds bits as split8() does, except for the last byte.
inline __m512i bits_to_split(__m512 values, int8_t) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 8), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7f)));
}
inline __m512i bits_to_split(__m512 values, int16_t) { return _mm512_castps_si512(values); }

template <class Remainder>
int64_t split_vectors(const float* from, uint16_t* halves, Remainder* remainders, int64_t count) {
  constexpr int kWidth = 32;
  alignas(64) static constexpr uint16_t kEven[kWidth] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                         22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                         44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  const __m512i even = _mm512_load_si512(kEven), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
  const __m512i tie = _mm512_set1_epi32(0x8000);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const __m512 first = _mm512_loadu_ps(from + i), second = _mm512_loadu_ps(from + i + 16);
    if (_mm512_cmp_ps_mask(first, second, _CMP_UNORD_Q) != 0) [[unlikely]] {
      for (int k = 0; k < kWidth; ++k) split_into(from[i + k], halves[i + k], remainders[i + k]);
      continue;
    }
    const __m512i a = bits_to_split(first, Remainder()), b = bits_to_split(second, Remainder());
    const __m512i rounded = _mm512_permutex2var_epi16(_mm512_add_epi32(a, tie), odd, _mm512_add_epi32(b, tie));
    _mm512_storeu_si512(halves + i, rounded);
    // The remainder is the last half of the bits, because the first half has zeros there.
    store_remainders(_mm512_permutex2var_epi16(a, even, b), remainders + i);
  }
  return i;
}
#elif defined(__AVX2__)
using Lanes = __m256;
using LaneWords = __m256i;
inline Lanes decode(const int8_t* codes, float unit) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const Lanes number = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  return number * _mm256_andnot_ps(_mm256_set1_ps(-0.0f), number) * unit;
}
inline Lanes decode(const uint8_t* codes, float unit) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const Lanes root = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)) * unit;
  return root * root;
}

// Computes the same as the version for AVX-512; the relative error before the last rounding is 2^-33.
inline __m256 root_of_code(__m256 values) {
  constexpr float kLeast = 0x1p-20f;
  const __m256 estimate = _mm256_rsqrt_ps(_mm256_max_ps(values, _mm256_set1_ps(kLeast)));
  const __m256 half = _mm256_mul_ps(estimate, _mm256_set1_ps(0.5f));
  __m256 root = _mm256_mul_ps(values, estimate);
  for (int i = 0; i < 2; ++i) root = _mm256_fmadd_ps(_mm256_fnmadd_ps(root, root, values), half, root);
  return root;
}

// Rounds finite magnitudes as Number::encode() does.
template <class Number>
__m256i float8_numbers(__m256 magnitudes) {
  const __m256i bits = _mm256_castps_si256(magnitudes);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, Number::kShift), _mm256_set1_epi32(1));
  constexpr int kHalf = (1 << (Number::kShift - 1)) - 1 - static_cast<int>(Number::kRebias);
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(kHalf)), odd);
  const __m256i rounding = _mm256_set1_epi32(Number::kRounding);
  const __m256i sum = _mm256_castps_si256(_mm256_add_ps(magnitudes, _mm256_castsi256_ps(rounding)));
  const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(Number::kSmallestNormal), bits);
  return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, Number::kShift), _mm256_sub_epi32(sum, rounding), is_subnormal);
}

// Return the codes of 8 prepared values, one per word.
inline __m256i codes_of(const float* from, __m256 factor, SignedCode) {
  const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN));
  const __m256 values = _mm256_loadu_ps(from);
  const __m256 root = root_of_code(_mm256_mul_ps(_mm256_andnot_ps(sign, values), factor));
  return _mm256_sign_epi32(_mm256_cvtps_epi32(root), _mm256_castps_si256(values));  // negates for negative values
}

inline __m256i codes_of(const float* from, __m256 factor, SquaredCode) {
  const __m256 roots = _mm256_loadu_ps(from);
  const __m256i least = _mm256_min_epi32(_mm256_castps_si256(roots), _mm256_set1_epi32(1));  // 1 for positive roots
  return _mm256_max_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(roots, factor)), least);
}

inline __m256i codes_of(const float* from, __m256 factor, SignedFloat8) {
  const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN)), values = _mm256_loadu_ps(from);
  const __m256i numbers = float8_numbers<SignedFloat8::Number>(_mm256_mul_ps(_mm256_andnot_ps(sign, values), factor));
  return _mm256_or_si256(numbers, _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(sign, values)), 24));
}

inline __m256i codes_of(const float* from, __m256 factor, SquaredFloat8) {
  const __m256 roots = _mm256_loadu_ps(from);
  const __m256 is_positive = _mm256_cmp_ps(roots, _mm256_setzero_ps(), _CMP_GT_OQ);
  const __m256i numbers = float8_numbers<SquaredFloat8::Number>(_mm256_mul_ps(roots, _mm256_mul_ps(roots, factor)));
  return _mm256_max_epi32(numbers, _mm256_srli_epi32(_mm256_castps_si256(is_positive), 31));
}

template <class Kind>
int64_t encode_vectors(const float* from, float factor, typename Kind::Code* to, int64_t count) {
  constexpr int kWidth = 32;
  const __m256 factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const auto words = [&](int at) {
      return _mm256_packs_epi32(codes_of(from + i + at, factors, Kind()), codes_of(from + i + at + 8, factors, Kind()));
    };
    const __m256i first = words(0), second = words(16);
    constexpr bool kIsSigned = std::is_signed_v<typename Kind::Code>;
    const __m256i bytes = kIsSigned ? _mm256_packs_epi16(first, second) : _mm256_packus_epi16(first, second);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // The packing interleaves halves of operands.
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_permutevar8x32_epi32(bytes, in_order));
  }
  return i;
}

// Remainders are words here. The last byte is 0, or ignored, where they have 8 bits.
constexpr int kInOrder = 0b11011000;  // Packing and unpacking take halves of their operands.
inline __m256i load_remainders(const int16_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline __m256i load_remainders(const int8_t* from) {
  return _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 8);
}
inline void store_remainders(__m256i words, int16_t* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words); }
inline void store_remainders(__m256i words, int8_t* to) {
  const __m256i bytes = _mm256_srli_epi16(words, 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}

template <class Remainder>
int64_t join_vectors(const uint16_t* halves, const Remainder* remainders, float* to, int64_t count) {
  constexpr int kWidth = 16;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + i));
    const __m256i remainder = load_remainders(remainders + i), is_negative = _mm256_srai_epi16(remainder, 15);
    const __m256i is_zero = _mm256_cmpeq_epi16(_mm256_add_epi16(half, half), _mm256_setzero_si256());
    const __m256i last = _mm256_andnot_si256(_mm256_and_si256(is_zero, is_negative), remainder);  // none is stale
    const __m256i first = _mm256_add_epi16(half, _mm256_andnot_si256(is_zero, is_negative));
    const __m256i firsts = _mm256_permute4x64_epi64(first, kInOrder), lasts = _mm256_permute4x64_epi64(last, kInOrder);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_unpacklo_epi16(lasts, firsts));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 8), _mm256_unpackhi_epi16(lasts, firsts));
  }
  return i;
}

// Rounds bits as split8() does, except for the last byte.
inline __m256i bits_to_split(__m256 values, int8_t) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 8), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7f)));
}
inline __m256i bits_to_split(__m256 values, int16_t) { return _mm256_castps_si256(values); }

template <class Remainder>
int64_t split_vectors(const float* from, uint16_t* halves, Remainder* remainders, int64_t count) {
  constexpr int kWidth = 16;
  const __m256i tie = _mm256_set1_epi32(0x8000), last = _mm256_set1_epi32(0xffff);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const __m256 first = _mm256_loadu_ps(from + i), second = _mm256_loadu_ps(from + i + 8);
    if (_mm256_movemask_ps(_mm256_cmp_ps(first, second, _CMP_UNORD_Q)) != 0) [[unlikely]] {
      for (int k = 0; k < kWidth; ++k) split_into(from[i + k], halves[i + k], remainders[i + k]);
      continue;
    }
    const __m256i a = bits_to_split(first, Remainder()), b = bits_to_split(second, Remainder());
    const __m256i half = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_add_epi32(a, tie), 16),
                                             _mm256_srli_epi32(_mm256_add_epi32(b, tie), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves + i), _mm256_permute4x64_epi64(half, kInOrder));
    // The remainder is the last half of the bits, because the first half has zeros there.
    const __m256i remainder = _mm256_packus_epi32(_mm256_and_si256(a, last), _mm256_and_si256(b, last));
    store_remainders(_mm256_permute4x64_epi64(remainder, kInOrder), remainders + i);
  }
  return i;
}
#else
template <class Kind>
int64_t encode_vectors(const float*, float, typename Kind::Code*, int64_t) {
  return 0;
}
template <class Remainder>
int64_t join_vectors(const uint16_t*, const Remainder*, float*, int64_t) {
  return 0;
}
template <class Remainder>
int64_t split_vectors(const float*, uint16_t*, Remainder*, int64_t) {
  return 0;
}
#endif

#if defined(__AVX2__)
using LaneIntegers [[gnu::vector_size(sizeof(Lanes))]] = int32_t;  // Comparisons return -1 for true.
using LaneBits [[gnu::vector_size(sizeof(Lanes))]] = uint32_t;

// Returns drawn_from() of the values.
inline Lanes drawn_from(Lanes values) {
  const auto number = reinterpret_cast<LaneIntegers>(reinterpret_cast<LaneBits>(values) * kDrawing >> 22);
  return (__builtin_convertvector(number, Lanes) + 0.5f) * 0x1p-10f;
}

inline LaneWords codes_of(const float* from, Lanes factor, Signed4) {
  Lanes values;
  std::memcpy(&values, from, sizeof(values));
  const LaneIntegers is_negative = reinterpret_cast<LaneIntegers>(values) >> 31;
  const Lanes steps = reinterpret_cast<Lanes>(reinterpret_cast<LaneIntegers>(values) & INT32_MAX) * factor;
  const Lanes drawn = drawn_from(values);
  LaneIntegers codes = {};
  for (int code = 1; code <= 7; ++code) {
    const float lower = Signed4::cube(code - 1), gap = Signed4::cube(code) - lower;
    codes -= steps >= lower + drawn * gap;
  }
  return reinterpret_cast<LaneWords>((codes ^ is_negative) - is_negative);
}

inline LaneWords codes_of(const float* from, Lanes factor, Squared4) {
  Lanes roots;
  std::memcpy(&roots, from, sizeof(roots));
  const Lanes steps = roots * factor;
  const LaneIntegers code = __builtin_convertvector(root_of_code(steps), LaneIntegers);
  const Lanes number = __builtin_convertvector(code, Lanes);
  const LaneIntegers rounded = code - (steps >= number * number + drawn_from(roots) * (2 * number + 1));
  const LaneIntegers least = roots > 0 ? LaneIntegers{} + 1 : LaneIntegers{};
  return reinterpret_cast<LaneWords>(rounded > least ? rounded : least);
}
#endif

// Decodes finite blocks of 4-bit codes, one per byte, in whole vectors.
template <class Kind>
int64_t decode_vectors(const typename Kind::Code* from, float unit, float* to, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (Kind::kPerByte == 2) {
    alignas(64) static constexpr std::array<float, 16> kLevels = [] {
      std::array<float, 16> levels = {};
      for (int code = 0; code < 16; ++code) {
        levels[code] = Kind::level(std::is_signed_v<typename Kind::Code> && code > 7 ? code - 16 : code);
      }
      return levels;
    }();
    const __m512 levels = _mm512_load_ps(kLevels.data()), units = _mm512_set1_ps(unit);
    for (; i + 16 <= count; i += 16) {  // The permutation reads the last 4 bits of a code.
      const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
      _mm512_storeu_ps(to + i, Kind::of_level(_mm512_mul_ps(_mm512_permutexvar_ps(codes, levels), units)));
    }
  }
#endif
  return i;
}

// Separates bytes with two 4-bit codes each.
template <class Kind>
void unpack(const uint8_t* from, typename Kind::Code* to, int64_t num_bytes) {
  int64_t i = 0;
#if defined(__AVX2__)
  const __m128i low = _mm_set1_epi8(15), sign = _mm_set1_epi8(std::is_signed_v<typename Kind::Code> ? 8 : 0);
  for (; i + 16 <= num_bytes; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const auto extended = [&](__m128i codes) {
      return _mm_sub_epi8(_mm_xor_si128(_mm_and_si128(codes, low), sign), sign);
    };
    const __m128i first = extended(bytes), second = extended(_mm_srli_epi16(bytes, 4));
    auto* const target = reinterpret_cast<__m128i*>(to + 2 * i);
    _mm_storeu_si128(target, _mm_unpacklo_epi8(first, second));
    _mm_storeu_si128(target + 1, _mm_unpackhi_epi8(first, second));
  }
#endif
  for (i *= 2; i < 2 * num_bytes; ++i) to[i] = code_at<Kind>(from, i);
}

// Packs codes, an even number of them.
template <class Kind>
void pack(const typename Kind::Code* from, uint8_t* to, int64_t num_bytes) {
  int64_t i = 0;
#if defined(__AVX2__)
  const __m128i low = _mm_set1_epi8(15), weights = _mm_set1_epi16(16 << 8 | 1);
  const auto pairs = [&](int64_t at) {  // one per word
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
    return _mm_maddubs_epi16(_mm_and_si128(codes, low), weights);
  };
  for (; i + 16 <= num_bytes; i += 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_packus_epi16(pairs(2 * i), pairs(2 * i + 16)));
  }
#endif
  for (; i < num_bytes; ++i) {
    to[i] = packed(static_cast<uint32_t>(from[2 * i]), static_cast<uint32_t>(from[2 * i + 1]));
  }
}

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::formats
