// Rounds blocks of values to float8 e5m2 and back: compiled once per instruction set (DRIVETRAIN_ISA names the
// namespace), includes no torch header.
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "ddp/transport/torch/float8_wire.h"
#include "formats/float8.h"

namespace drivetrain::ddp::DRIVETRAIN_ISA {
namespace {

using formats::bits_as;
using formats::kInfinity;
using formats::magnitude_bits;
using Number = formats::Float8<5, 2>;

constexpr uint32_t kInfiniteCode = 0x7c, kNanCode = 0x7f, kSignOfCode = 0x80;
constexpr int64_t kWireBlock = 1 + kFloat8Block;

// Return 2^(exponent - 141), and its reciprocal.
float unit_of(uint32_t exponent) { return bits_as<float>((exponent - 14) << 23); }
float factor_of(uint32_t exponent) { return bits_as<float>((268 - exponent) << 23); }

uint32_t code_of(float value, float factor) {
  const uint32_t magnitude = magnitude_bits(value), sign = bits_as<uint32_t>(value) >> 24 & kSignOfCode;
  const uint32_t number = Number::encode(bits_as<float>(magnitude) * factor);
  const uint32_t special = magnitude > kInfinity ? kNanCode : kInfiniteCode;
  return sign | (magnitude < kInfinity ? number : special);
}

float value_of(uint32_t code, float unit) {
  const uint32_t number = code & ~kSignOfCode, sign = (code & kSignOfCode) << 24;
  const uint32_t finite = bits_as<uint32_t>(Number::decode(number) * unit);
  const uint32_t special = number > kInfiniteCode ? 0x7fc00000u : kInfinity;
  return bits_as<float>(sign | (number < kInfiniteCode ? finite : special));
}

// As value_of(): an e5m2 code is the upper byte of a float16, which processors widen. NaN keeps value_of()'s bits.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
void store_values(const uint8_t* codes, float unit, float* to) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m512 halves = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
  const __m512 values = _mm512_mul_ps(halves, _mm512_set1_ps(unit));
  const __m512i bits = _mm512_castps_si512(values);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i kept = _mm512_set1_epi32(static_cast<int>(0xffc00000u));
  _mm512_storeu_si512(to, _mm512_mask_and_epi32(bits, is_nan, bits, kept));
}
#elif defined(__F16C__)
constexpr int64_t kLanes = 8;
void store_values(const uint8_t* codes, float unit, float* to) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m256 halves = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8));
  const __m256 values = _mm256_mul_ps(halves, _mm256_set1_ps(unit));
  const __m256 kept = _mm256_and_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffc00000u))));
  _mm256_storeu_ps(to, _mm256_blendv_ps(values, kept, _mm256_cmp_ps(values, values, _CMP_UNORD_Q)));
}
#else
constexpr int64_t kLanes = 1;
void store_values(const uint8_t* codes, float unit, float* to) { *to = value_of(*codes, unit); }
#endif

void decode_block(const uint8_t* from, int64_t count, float* to) {
  const float unit = unit_of(from[0]);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_values(from + 1 + i, unit, to + i);
  for (; i < count; ++i) to[i] = value_of(from[1 + i], unit);
}

// Writes the block of these values, which it may change. Loops handle one width each, because compilers vectorize
// these.
void encode_block(float* values, float* errors, int64_t count, uint8_t* to) {
  if (errors != nullptr) {
    for (int64_t i = 0; i < count; ++i) values[i] += errors[i];
  }
  alignas(64) uint32_t words[kFloat8Block];
  std::memcpy(words, values, count * sizeof(float));
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, words[i] & 0x7fffffffu);
  if (largest >= kInfinity) {
    largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, formats::finite_magnitude(values[i]));
  }
  const uint32_t exponent = std::max<uint32_t>(largest >> 23, kLeastExponent);
  const float factor = factor_of(exponent);
  for (int64_t i = 0; i < count; ++i) words[i] = code_of(values[i], factor);
  to[0] = static_cast<uint8_t>(exponent);
  for (int64_t i = 0; i < count; ++i) to[1 + i] = static_cast<uint8_t>(words[i]);
  if (errors == nullptr) return;
  alignas(64) float sent[kFloat8Block];
  decode_block(to, count, sent);
  for (int64_t i = 0; i < count; ++i) {
    const float rest = values[i] - sent[i];
    errors[i] = magnitude_bits(rest) < kInfinity ? rest : 0.0f;
  }
}

// Calls a function with the index of each block's first value, the block's size, and its first byte on the wire.
template <class Function>
void for_blocks(int64_t numel, Function&& function) {
  for (int64_t at = 0; at < numel; at += kFloat8Block) {
    function(at, std::min(kFloat8Block, numel - at), at / kFloat8Block * kWireBlock);
  }
}

float* from(float* errors, int64_t at) { return errors == nullptr ? nullptr : errors + at; }

void encode(const float* values, float* errors, int64_t numel, uint8_t* to) {
  alignas(64) float block[kFloat8Block];
  for_blocks(numel, [&](int64_t at, int64_t count, int64_t byte) {
    std::memcpy(block, values + at, count * sizeof(float));
    encode_block(block, from(errors, at), count, to + byte);
  });
}

void sum(uint8_t* const* pieces, int num_pieces, int num_outputs, float* errors, int64_t numel) {
  alignas(64) float total[kFloat8Block];
  alignas(64) float next[kFloat8Block];
  for_blocks(numel, [&](int64_t at, int64_t count, int64_t byte) {
    decode_block(pieces[0] + byte, count, total);
    for (int piece = 1; piece < num_pieces; ++piece) {
      decode_block(pieces[piece] + byte, count, next);
      for (int64_t i = 0; i < count; ++i) total[i] += next[i];
    }
    encode_block(total, from(errors, at), count, pieces[0] + byte);
    for (int piece = 1; piece < num_outputs; ++piece) std::memcpy(pieces[piece] + byte, pieces[0] + byte, 1 + count);
  });
}

// Goes from the last block to the first, so that it never writes over blocks that are still to be read.
void decode(const uint8_t* from, int64_t numel, float* to) {
  alignas(64) uint8_t block[kWireBlock];
  for (int64_t number = (numel + kFloat8Block - 1) / kFloat8Block - 1; number >= 0; --number) {
    const int64_t at = number * kFloat8Block, count = std::min(kFloat8Block, numel - at);
    std::memcpy(block, from + number * kWireBlock, 1 + count);
    decode_block(block, count, to + at);
  }
}

}  // namespace

Float8Wire float8_wire() { return {encode, sum, decode}; }

}  // namespace drivetrain::ddp::DRIVETRAIN_ISA
