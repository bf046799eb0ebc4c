// Loads and stores a tile of values in any storage format on the CPU. Needs no torch header.
#pragma once

#include <algorithm>

#include "formats/compressed_cpu.h"
#include "formats/float8.h"
#include "formats/storage.h"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace drivetrain::formats {
inline namespace DRIVETRAIN_ISA {

// Elements per tile: five float arrays of a tile stay in the L1 cache, and the cost of a call per tile is negligible.
constexpr int kTile = 512;
static_assert(kTile % kBlock == 0);

// float16 uses the processor's conversion where there is one: the same bits as storage.h, and much faster.
inline void load_float16(const uint16_t* from, float* to, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
  }
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#elif defined(__ARM_NEON)
  for (; i + 4 <= count; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
#endif
  for (; i < count; ++i) to[i] = float_from_float16(from[i]);
}

inline void store_float16(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__ARM_NEON)
  for (; i + 4 <= count; i += 4) vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
  for (; i < count; ++i) to[i] = float16_from_float(from[i]);
}

// bfloat16: explicit vector code on x86-64, where the compiler's narrowing of rounded values takes twice as long.
#if defined(__AVX2__) || defined(__ARM_NEON)
constexpr bool kHasBFloat16Vectors = true;
#else
constexpr bool kHasBFloat16Vectors = false;
#endif

#if defined(__AVX512F__)
inline const bool kHasBFloat16Instruction = __builtin_cpu_supports("avx512bf16");

// Rounds 16 values as bfloat16_from_float() does.
inline __m256i bfloat16_vector(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(kQuiet));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}

inline void load_bfloat16_vector(const uint16_t* from, float* to) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  _mm512_storeu_si512(to, _mm512_slli_epi32(words, 16));
}

inline void store_bfloat16_vector(const float* from, uint16_t* to) {
  const __m512 values = _mm512_loadu_ps(from);
  __m256i halves;
  constexpr int kSubnormal = 0x20;
  // The instruction gives bfloat16_from_float()'s bits except for subnormal values, which it replaces by zeros.
  if (kHasBFloat16Instruction && _mm512_fpclass_ps_mask(values, kSubnormal) == 0) [[likely]] {
    // Assembler, because these sources are compiled for processors without the instruction as well.
    asm("vcvtneps2bf16 %1, %0" : "=v"(halves) : "v"(values));
  } else {
    halves = bfloat16_vector(values);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
#elif defined(__AVX2__)
// Rounds 8 values as bfloat16_from_float() does, and returns each in the lower half of a word.
inline __m256i bfloat16_words(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(kQuiet));
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan);
  return _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
}

inline void load_bfloat16_vector(const uint16_t* from, float* to) {
  for (int i = 0; i < 16; i += 8) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_slli_epi32(words, 16));
  }
}

inline void store_bfloat16_vector(const float* from, uint16_t* to) {
  const __m256i packed =
      _mm256_packus_epi32(bfloat16_words(_mm256_loadu_ps(from)), bfloat16_words(_mm256_loadu_ps(from + 8)));
  constexpr int kInOrder = 0b11011000;  // packus interleaves the halves of its operands
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, kInOrder));
}
#endif

inline void load_bfloat16(const uint16_t* from, float* to, int64_t count) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + 16 <= count; i += 16) load_bfloat16_vector(from + i, to + i);
#endif
  for (; i < count; ++i) to[i] = float_from_bfloat16(from[i]);
}

inline void store_bfloat16(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + 16 <= count; i += 16) store_bfloat16_vector(from + i, to + i);
#endif
  for (; i < count; ++i) to[i] = bfloat16_from_float(from[i]);
}

// Loads one element of a plain format, for formats without a loop below.
template <class T>
inline T load_one(const TypedArray& array, int64_t index) {
  switch (array.format) {
    case Format::kFloat64:
      return static_cast<T>(static_cast<const double*>(array.data)[index]);
    case Format::kBFloat16:
      return static_cast<T>(float_from_bfloat16(static_cast<const uint16_t*>(array.data)[index]));
    case Format::kFloat16:
      return static_cast<T>(float_from_float16(static_cast<const uint16_t*>(array.data)[index]));
    default:
      return static_cast<T>(static_cast<const float*>(array.data)[index]);
  }
}

template <class T>
inline void store_one(const TypedArray& array, int64_t index, T value) {
  switch (array.format) {
    case Format::kFloat64:
      static_cast<double*>(array.data)[index] = static_cast<double>(value);
      return;
    case Format::kBFloat16:
      static_cast<uint16_t*>(array.data)[index] = bfloat16_from_float(static_cast<float>(value));
      return;
    case Format::kFloat16:
      static_cast<uint16_t*>(array.data)[index] = float16_from_float(static_cast<float>(value));
      return;
    default:
      static_cast<float*>(array.data)[index] = static_cast<float>(value);
      return;
  }
}

// ---- Blocks of codes. `from` and `to` point to a block's first value; `count` is Kind::kPerScale, or less at the end
// of the array. 4-bit codes have a byte each here.

template <class Kind>
void load_block(const typename Kind::Code* from, float scale, float* to, int64_t count) {
  if (has_special(scale)) {
    for (int64_t i = 0; i < count; ++i) to[i] = decode_any<Kind>(from[i], scale);
    return;
  }
  const float unit = Kind::unit_of(scale);
  for (int64_t i = decode_vectors<Kind>(from, unit, to, count); i < count; ++i) to[i] = Kind::decode(from[i], unit);
}

// Stores a block of prepared values, given their largest magnitude, and returns its scale.
template <class Kind>
float store_block(const float* from, uint32_t largest, typename Kind::Code* to, int64_t count) {
  if (largest >= kInfinity) {
    uint32_t largest_finite = 0;
    for (int64_t i = 0; i < count; ++i) largest_finite = std::max(largest_finite, finite_magnitude(from[i]));
    const float scale = scale_with_room<Kind>(Kind::scale_of(largest_finite)), factor = Kind::factor_of(scale);
    for (int64_t i = 0; i < count; ++i) to[i] = encode_any<Kind>(from[i], factor);
    return with_special(scale);
  }
  const float scale = Kind::scale_of(largest), factor = Kind::factor_of(scale);
  for (int64_t i = encode_vectors<Kind>(from, factor, to, count); i < count; ++i) to[i] = Kind::encode(from[i], factor);
  return scale;
}

template <class Kind>
void store_prepared(const TypedArray& array, int64_t index, int64_t count, const float* prepared, uint32_t largest) {
  auto* scales = static_cast<float*>(array.extra) + index / Kind::kPerScale;
  if constexpr (Kind::kPerByte == 1) {
    *scales = store_block<Kind>(prepared, largest, static_cast<typename Kind::Code*>(array.data) + index, count);
    return;
  }
  auto* bytes = static_cast<uint8_t*>(array.data) + index / 2;
  for (int64_t from = 0; from < count; from += Kind::kPerScale, bytes += Kind::kPerScale / 2) {
    const int64_t size = std::min<int64_t>(count - from, Kind::kPerScale);
    alignas(64) typename Kind::Code codes[Kind::kPerScale] = {};
    largest = 0;
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, magnitude_bits(prepared[from + i]));
    *scales++ = store_block<Kind>(prepared + from, largest, codes, size);
    pack<Kind>(codes, bytes, (size + 1) / 2);
  }
}

// Stores one block of prepared values. `index` is its first value's, a multiple of kBlock.
inline void store_prepared(const TypedArray& array, int64_t index, int64_t count, const float* prepared,
                           uint32_t largest) {
  switch (array.format) {
    case Format::kSigned8:
      return store_prepared<SignedCode>(array, index, count, prepared, largest);
    case Format::kSignedFloat8:
      return store_prepared<SignedFloat8>(array, index, count, prepared, largest);
    case Format::kSquaredFloat8:
      return store_prepared<SquaredFloat8>(array, index, count, prepared, largest);
    case Format::kSigned4:
      return store_prepared<Signed4>(array, index, count, prepared, largest);
    case Format::kSquared4:
      return store_prepared<Squared4>(array, index, count, prepared, largest);
    default:
      return store_prepared<SquaredCode>(array, index, count, prepared, largest);
  }
}

// Loads all blocks of a tile. `index` is the tile's first value's, a multiple of kBlock.
template <class Kind>
void load_blocks(const TypedArray& array, int64_t index, int64_t count, float* to) {
  constexpr int kSize = Kind::kPerScale;
  const auto* codes = static_cast<const typename Kind::Code*>(array.data) + index / Kind::kPerByte;
  const auto* scales = static_cast<const float*>(array.extra) + index / kSize;
  for (int64_t from = 0; from < count; from += kSize) {
    const int64_t size = std::min<int64_t>(count - from, kSize);
    if constexpr (Kind::kPerByte == 1) {
      load_block<Kind>(codes + from, scales[from / kSize], to + from, size);
    } else {
      alignas(64) typename Kind::Code unpacked[kSize];
      unpack<Kind>(reinterpret_cast<const uint8_t*>(codes) + from / 2, unpacked, (size + 1) / 2);
      load_block<Kind>(unpacked, scales[from / kSize], to + from, size);
    }
  }
}

template <class Kind>
void store_blocks(const TypedArray& array, int64_t index, int64_t count, const float* values) {
  alignas(64) float prepared[kBlock];
  for (int64_t from = 0; from < count; from += kBlock) {
    const int64_t size = std::min<int64_t>(count - from, kBlock);
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) prepared[i] = Kind::prepare(values[from + i]);
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, magnitude_bits(prepared[i]));
    store_prepared<Kind>(array, index + from, size, prepared, largest);
  }
}

// ---- Tiles.

// Returns whether the values need no conversion.
template <class T>
bool is_native(const TypedArray& array) {
  return array.format == (sizeof(T) == sizeof(float) ? Format::kFloat32 : Format::kFloat64);
}

// Returns the tile's values as T: the memory itself where it has that type, else a converted copy in `scratch`.
template <class T>
T* load_tile(const TypedArray& array, int64_t index, int64_t count, T* scratch) {
  if (is_native<T>(array)) return static_cast<T*>(array.data) + index;
  if constexpr (sizeof(T) == sizeof(float)) {
    const auto* halves = static_cast<const uint16_t*>(array.data) + index;
    switch (array.format) {
      case Format::kBFloat16:
      case Format::kBFloat16Stochastic:
        load_bfloat16(halves, scratch, count);
        return scratch;
      case Format::kFloat16:
      case Format::kFloat16Stochastic:
        load_float16(halves, scratch, count);
        return scratch;
      case Format::kBFloat16Remainder16: {
        const auto* remainders = static_cast<const int16_t*>(array.extra) + index;
        int64_t i = join_vectors(halves, remainders, scratch, count);
        for (; i < count; ++i) scratch[i] = join(halves[i], remainders[i]);
        return scratch;
      }
      case Format::kBFloat16Remainder8: {
        const auto* remainders = static_cast<const int8_t*>(array.extra) + index;
        int64_t i = join_vectors(halves, remainders, scratch, count);
        for (; i < count; ++i) scratch[i] = join8(halves[i], remainders[i]);
        return scratch;
      }
      case Format::kBFloat16Kahan: {
        const auto* compensations = static_cast<const uint16_t*>(array.extra) + index;
        for (int64_t i = 0; i < count; ++i) scratch[i] = compensated_bfloat16(halves[i], compensations[i]);
        return scratch;
      }
      case Format::kFloat16Kahan: {
        const auto* compensations = static_cast<const uint16_t*>(array.extra) + index;
        for (int64_t i = 0; i < count; ++i) scratch[i] = compensated_float16(halves[i], compensations[i]);
        return scratch;
      }
      case Format::kFloat16Master: {
        const auto* masters = static_cast<const float*>(array.extra) + index;
        for (int64_t i = 0; i < count; ++i) scratch[i] = master_of(masters[i], halves[i]);
        return scratch;
      }
      case Format::kSigned8:
        load_blocks<SignedCode>(array, index, count, scratch);
        return scratch;
      case Format::kSquared8:
        load_blocks<SquaredCode>(array, index, count, scratch);
        return scratch;
      case Format::kSignedFloat8:
        load_blocks<SignedFloat8>(array, index, count, scratch);
        return scratch;
      case Format::kSquaredFloat8:
        load_blocks<SquaredFloat8>(array, index, count, scratch);
        return scratch;
      case Format::kSigned4:
        load_blocks<Signed4>(array, index, count, scratch);
        return scratch;
      case Format::kSquared4:
        load_blocks<Squared4>(array, index, count, scratch);
        return scratch;
      case Format::kFloat32:
      case Format::kFloat64:
      case Format::kFactored:
        break;
    }
  }
  for (int64_t i = 0; i < count; ++i) scratch[i] = load_one<T>(array, index + i);
  return scratch;
}

// Loads products of row and column factors for matrices of rows * columns elements.
template <class T>
T* load_factored(const TypedArray& array, int64_t rows, int64_t columns, int64_t index, int64_t count, T* scratch) {
  int64_t row = index / columns, column = index % columns, row_of_matrix = row % rows;
  const T* of_columns = static_cast<const T*>(array.extra) + row / rows * columns;
  for (int64_t i = 0; i < count;) {
    const T of_row = static_cast<const T*>(array.data)[row];
    const int64_t size = std::min(count - i, columns - column);
    for (int64_t k = 0; k < size; ++k) scratch[i + k] = of_row * of_columns[column + k];
    i += size;
    ++row;
    column = 0;
    if (++row_of_matrix == rows) {
      row_of_matrix = 0;
      of_columns += columns;
    }
  }
  return scratch;
}

// Loads a state of a parameter whose matrices have that shape.
template <class T>
T* load_state(const TypedArray& array, int64_t rows, int64_t columns, int64_t index, int64_t count, T* scratch) {
  return array.format == Format::kFactored ? load_factored(array, rows, columns, index, count, scratch)
                                           : load_tile(array, index, count, scratch);
}

// Writes a tile back unless load_tile() returned the memory itself. `key` seeds stochastic rounding.
template <class T>
void store_tile(const TypedArray& array, int64_t index, int64_t count, const T* values, uint64_t key = 0) {
  if (is_native<T>(array) || array.format == Format::kFactored) return;
  if constexpr (sizeof(T) == sizeof(float)) {
    auto* halves = static_cast<uint16_t*>(array.data) + index;
    switch (array.format) {
      case Format::kBFloat16:
        return store_bfloat16(values, halves, count);
      case Format::kFloat16:
        return store_float16(values, halves, count);
      case Format::kBFloat16Stochastic:
        for (int64_t i = 0; i < count; ++i) halves[i] = stochastic_bfloat16(values[i], random_bits(key, index + i));
        return;
      case Format::kFloat16Stochastic:
        for (int64_t i = 0; i < count; ++i) halves[i] = stochastic_float16(values[i], random_bits(key, index + i));
        return;
      case Format::kBFloat16Remainder16: {
        auto* remainders = static_cast<int16_t*>(array.extra) + index;
        for (int64_t i = split_vectors(values, halves, remainders, count); i < count; ++i) {
          split_into(values[i], halves[i], remainders[i]);
        }
        return;
      }
      case Format::kBFloat16Remainder8: {
        auto* remainders = static_cast<int8_t*>(array.extra) + index;
        for (int64_t i = split_vectors(values, halves, remainders, count); i < count; ++i) {
          split_into(values[i], halves[i], remainders[i]);
        }
        return;
      }
      case Format::kBFloat16Kahan: {
        auto* compensations = static_cast<uint16_t*>(array.extra) + index;
        store_bfloat16(values, halves, count);
        for (int64_t i = 0; i < count; ++i) compensations[i] = compensation_bfloat16(values[i], halves[i]);
        return;
      }
      case Format::kFloat16Kahan: {
        auto* compensations = static_cast<uint16_t*>(array.extra) + index;
        store_float16(values, halves, count);
        for (int64_t i = 0; i < count; ++i) compensations[i] = compensation_float16(values[i], halves[i]);
        return;
      }
      case Format::kFloat16Master:
        memcpy(static_cast<float*>(array.extra) + index, values, count * sizeof(float));
        return store_float16(values, halves, count);
      case Format::kSigned8:
        return store_blocks<SignedCode>(array, index, count, values);
      case Format::kSquared8:
        return store_blocks<SquaredCode>(array, index, count, values);
      case Format::kSignedFloat8:
        return store_blocks<SignedFloat8>(array, index, count, values);
      case Format::kSquaredFloat8:
        return store_blocks<SquaredFloat8>(array, index, count, values);
      case Format::kSigned4:
        return store_blocks<Signed4>(array, index, count, values);
      case Format::kSquared4:
        return store_blocks<Squared4>(array, index, count, values);
      case Format::kFloat32:
      case Format::kFloat64:
      case Format::kFactored:
        break;
    }
  }
  for (int64_t i = 0; i < count; ++i) store_one<T>(array, index + i, values[i]);
}

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::formats
