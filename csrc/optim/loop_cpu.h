// The CPU loop: walks a range of the flat order tile by tile; formats are chosen per tile, rules by template.
#pragma once

#include "optim/step.h"

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

// The one loop that touches elements: compiles to straight vector code for every rule.
template <class Rule, class T>
void update_tile(const Rule& shared_rule, T* __restrict param, const T* __restrict grad, T* __restrict state0,
                 T* __restrict state1, T* __restrict state2, int64_t count) {
  const Rule rule = shared_rule;  // a local copy cannot alias the arrays
  for (int64_t i = 0; i < count; ++i) {
    T p = param[i];
    T s[kMaxStates] = {};
    if constexpr (Rule::kNumStates > 0) s[0] = state0[i];
    if constexpr (Rule::kNumStates > 1) s[1] = state1[i];
    if constexpr (Rule::kNumStates > 2) s[2] = state2[i];
    rule(p, grad[i], s);
    param[i] = p;
    if constexpr (Rule::kNumStates > 0) state0[i] = s[0];
    if constexpr (Rule::kNumStates > 1) state1[i] = s[1];
    if constexpr (Rule::kNumStates > 2) state2[i] = s[2];
  }
}

template <template <class> class RuleOf, class T>
void update_range(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end) {
  using Rule = RuleOf<T>;
  const Rule rule(job.rules[param.rule].template as<typename Rule::Args>());
  bool in_place = is_native<T>(param.param) && is_native<T>(param.grad);
  for (int s = 0; s < Rule::kNumStates; ++s) in_place &= is_native<T>(param.state[s]);
  const int64_t tile = in_place ? end - begin : kTile;  // without conversion there is nothing to cut it up for
  alignas(64) T scratch[2 + kMaxStates][kTile];
  for (int64_t i = begin; i < end; i += tile) {
    const int64_t count = end - i < tile ? end - i : tile;
    T* values = load_tile(param.param, i, count, scratch[0]);
    const T* grad = load_tile(param.grad, i, count, scratch[1]);
    T* state[kMaxStates] = {};
    for (int s = 0; s < Rule::kNumStates; ++s) state[s] = load_tile(param.state[s], i, count, scratch[2 + s]);
    update_tile(rule, values, grad, state[0], state[1], state[2], count);
    store_tile(param.param, i, count, values);
    for (int s = 0; s < Rule::kNumStates; ++s) store_tile(param.state[s], i, count, state[s]);
  }
}

template <template <class> class RuleOf>
void loop_cpu(const StepJob& job, int64_t begin, int64_t end) {
  for (int32_t index = find_param(job, begin); index < job.num_params; ++index) {
    const ParamJob& param = job.params[index];
    if (param.begin >= end) break;
    const int64_t from = begin > param.begin ? begin - param.begin : 0;
    const int64_t to = end - param.begin < param.numel ? end - param.begin : param.numel;
    if (job.in_double) {
      update_range<RuleOf, double>(job, param, from, to);
    } else {
      update_range<RuleOf, float>(job, param, from, to);
    }
  }
}

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::optim
