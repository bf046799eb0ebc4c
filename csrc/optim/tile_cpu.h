// A tile of values on the CPU: loaded from whatever format it has, and stored back. Needs no torch header.
#pragma once

#include "optim/storage.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace drivetrain::optim {
inline namespace DRIVETRAIN_ISA {

// Elements per tile: five float arrays of it stay in L1, and one call per tile is noise.
constexpr int kTile = 512;

// fp16 goes through the processor's conversion where it has one: the same bits as storage.h's, much faster.
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
#endif
  for (; i < count; ++i) to[i] = float16_from_float(from[i]);
}

// One element, whatever its format: for tiles that have no loop of their own below.
template <class T>
inline T load_one(const Stream& stream, int64_t index) {
  switch (stream.format) {
    case Format::kFloat32:
      return static_cast<T>(static_cast<const float*>(stream.data)[index]);
    case Format::kFloat64:
      return static_cast<T>(static_cast<const double*>(stream.data)[index]);
    case Format::kBFloat16:
      return static_cast<T>(float_from_bfloat16(static_cast<const uint16_t*>(stream.data)[index]));
    case Format::kFloat16:
      return static_cast<T>(float_from_float16(static_cast<const uint16_t*>(stream.data)[index]));
  }
  return T();
}

template <class T>
inline void store_one(const Stream& stream, int64_t index, T value) {
  switch (stream.format) {
    case Format::kFloat32:
      static_cast<float*>(stream.data)[index] = static_cast<float>(value);
      return;
    case Format::kFloat64:
      static_cast<double*>(stream.data)[index] = static_cast<double>(value);
      return;
    case Format::kBFloat16:
      static_cast<uint16_t*>(stream.data)[index] = bfloat16_from_float(static_cast<float>(value));
      return;
    case Format::kFloat16:
      static_cast<uint16_t*>(stream.data)[index] = float16_from_float(static_cast<float>(value));
      return;
  }
}

// Whether the rule can work on the memory itself.
template <class T>
bool is_native(const Stream& stream) {
  return stream.format == (sizeof(T) == sizeof(float) ? Format::kFloat32 : Format::kFloat64);
}

// The tile's values as T: in place where they already are, else converted into scratch.
template <class T>
T* load_tile(const Stream& stream, int64_t index, int64_t count, T* scratch) {
  if (is_native<T>(stream)) return static_cast<T*>(stream.data) + index;
  const uint16_t* halves = static_cast<const uint16_t*>(stream.data) + index;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (stream.format == Format::kBFloat16) {
      for (int64_t i = 0; i < count; ++i) scratch[i] = float_from_bfloat16(halves[i]);
      return scratch;
    }
    if (stream.format == Format::kFloat16) {
      load_float16(halves, scratch, count);
      return scratch;
    }
  }
  for (int64_t i = 0; i < count; ++i) scratch[i] = load_one<T>(stream, index + i);
  return scratch;
}

// Writes a tile back unless load_tile gave the memory itself.
template <class T>
void store_tile(const Stream& stream, int64_t index, int64_t count, const T* values) {
  if (is_native<T>(stream)) return;
  uint16_t* halves = static_cast<uint16_t*>(stream.data) + index;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (stream.format == Format::kBFloat16) {
      for (int64_t i = 0; i < count; ++i) halves[i] = bfloat16_from_float(values[i]);
      return;
    }
    if (stream.format == Format::kFloat16) {
      store_float16(values, halves, count);
      return;
    }
  }
  for (int64_t i = 0; i < count; ++i) store_one<T>(stream, index + i, values[i]);
}

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::optim
