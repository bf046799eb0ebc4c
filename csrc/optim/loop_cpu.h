// Implements the CPU loop: visits a range of the flat order tile by tile. Formats are chosen per tile, rules by
// template.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>

#include "formats/summation.h"
#include "formats/tile_cpu.h"
#include "optim/statistics_cpu.h"
#include "optim/step.h"

namespace drivetrain::optim {
inline namespace DRIVETRAIN_ISA {

// The largest magnitudes among prepared values (storage.h) of states with 8-bit codes. They cost update_tile() nothing:
// a rule that divides by the root of a mean of squares has that root.
struct LargestPrepared {
  uint32_t largest[kMaxStates] = {};
};

// Updates element i. kCoded: states have 8 bits. `factor` multiplies gradients.
template <class Rule, bool kCoded, class T>
[[gnu::always_inline]] inline void update_element(const Rule& rule, T factor, T* param, const T* grad, T* state0,
                                                  T* state1, T* state2, T* state3, int64_t i, uint32_t& largest0,
                                                  uint32_t& largest1, uint32_t& largest2, uint32_t& largest3) {
  T p = param[i];
  T s[kMaxStates] = {};
  if constexpr (Rule::kNumStates > 0) s[0] = state0[i];
  if constexpr (Rule::kNumStates > 1) s[1] = state1[i];
  if constexpr (Rule::kNumStates > 2) s[2] = state2[i];
  if constexpr (Rule::kNumStates > 3) s[3] = state3[i];
  rule(p, factor * grad[i], s);
  param[i] = p;
  if constexpr (kCoded) {
    for (int k = 0; k < Rule::kNumStates; ++k) {
      if (Rule::kSquared[k]) s[k] = SquaredCode::prepare(s[k]);
    }
    largest0 = std::max(largest0, magnitude_bits(s[0]));
    largest1 = std::max(largest1, magnitude_bits(s[1]));
    largest2 = std::max(largest2, magnitude_bits(s[2]));
    largest3 = std::max(largest3, magnitude_bits(s[3]));
  }
  if constexpr (Rule::kNumStates > 0) state0[i] = s[0];
  if constexpr (Rule::kNumStates > 1) state1[i] = s[1];
  if constexpr (Rule::kNumStates > 2) state2[i] = s[2];
  if constexpr (Rule::kNumStates > 3) state3[i] = s[3];
}

// The loop over elements, which compiles to straight vector code for every rule.
template <class Rule, bool kCoded, class T>
void update_tile(const Rule& shared_rule, T factor, T* __restrict param, const T* __restrict grad, T* __restrict state0,
                 T* __restrict state1, T* __restrict state2, T* __restrict state3, int64_t count,
                 LargestPrepared& prepared) {
  const Rule rule = shared_rule;  // A local copy cannot alias the arrays.
  uint32_t largest0 = 0, largest1 = 0, largest2 = 0, largest3 = 0;
  for (int64_t i = 0; i < count; ++i) {
    update_element<Rule, kCoded>(rule, factor, param, grad, state0, state1, state2, state3, i, largest0, largest1,
                                 largest2, largest3);
  }
  if constexpr (kCoded) prepared = {{largest0, largest1, largest2, largest3}};
}

// Updates a tile to the same bits, and measures it by a loop of its own, which reads the cache. Both together would
// need more registers than there are. `before` receives the parameter's values.
template <class Rule, bool kCoded, class T>
void update_and_measure(const Rule& shared_rule, T factor, T* __restrict before, T* __restrict param,
                        const T* __restrict grad, T* const* state, int64_t count, LargestPrepared& prepared,
                        Statistics<T>& shared_measured) {
  int64_t i = 0;
#if defined(__AVX2__)
  if constexpr (std::is_same_v<Rule, Adam<float>> && !kCoded) {  // One loop for tiles that wait for memory.
    const Rule rule = shared_rule;
    Statistics<float> measured = shared_measured;
    for (; i + measured.kWidth <= count; i += measured.kWidth) {
      const Lanes gradient = measured.vector_of(grad + i), old = measured.vector_of(param + i);
      Lanes value = old, of_states[kMaxStates] = {};
      for (int s = 0; s < Rule::kNumStates; ++s) of_states[s] = measured.vector_of(state[s] + i);
      rule(value, factor * gradient, of_states);
      measured.add(gradient, old, value);
      std::memcpy(before + i, &old, sizeof(old));
      std::memcpy(param + i, &value, sizeof(value));
      for (int s = 0; s < Rule::kNumStates; ++s) std::memcpy(state[s] + i, &of_states[s], sizeof(of_states[s]));
    }
    measured.end_add(grad, i);
    shared_measured = measured;
    if (i == count) return;
  }
#endif
  std::copy(param + i, param + count, before + i);
  const auto at = [&](int s) { return s < Rule::kNumStates ? state[s] + i : nullptr; };
  update_tile<Rule, kCoded>(shared_rule, factor, param + i, grad + i, at(0), at(1), at(2), at(3), count - i, prepared);
  shared_measured.add(grad + i, before + i, param + i, count - i);
}

// Writes a tile's gradients after the rule has read them, while they are in the cache. `grad` is load_tile()'s result.
template <class T>
void leave_grad(const GradScaling& grad_scaling, const TypedArray& stream, int64_t index, int64_t count, T* grad) {
  const T factor = T(grad_scaling.factor);
  switch (grad_scaling.after) {
    case GradAfter::kKeep:
      return;
    case GradAfter::kScaled:
      for (int64_t i = 0; i < count; ++i) grad[i] = factor * grad[i];
      break;
    case GradAfter::kZero:  // Zeros of every plain format are bytes of zeros.
      std::memset(static_cast<char*>(stream.data) + index * bytes_of(stream.format), 0,
                  count * bytes_of(stream.format));
      return;
  }
  store_tile(stream, index, count, grad);
}

// The number of elements that are converted, updated and converted back before the next ones. They are so few that the
// processor overlaps conversions with divisions and roots, and enough to fill its vectors.
#if defined(__AVX512F__)
constexpr int kBFloat16Group = 64;
#else
constexpr int kBFloat16Group = 32;
#endif

inline bool is_all_bfloat16(const ParamJob& param, int num_states) {
  bool is_all = param.param.format == Format::kBFloat16 && param.grad.format == Format::kBFloat16;
  for (int s = 0; s < num_states; ++s) is_all &= param.state[s].format == Format::kBFloat16;
  return is_all;
}

// Updates a parameter whose values, gradient and states are all bfloat16, in whole groups from `begin` on. Returns the
// first element that it left out, fewer than kBFloat16Group before `end`.
template <class Rule, bool kMeasures>
int64_t update_bfloat16(const Rule& rule, const StepJob& job, const ParamJob& param, int64_t begin, int64_t end,
                        Statistics<float>& shared_measured) {
  const auto halves = [](const TypedArray& array) { return static_cast<uint16_t*>(array.data); };
  const float factor = static_cast<float>(job.grad_scaling.factor);
  Statistics<float> measured;
  int64_t i = begin;
  for (; i + kBFloat16Group <= end; i += kBFloat16Group) {
    alignas(64) float values[kBFloat16Group], grad[kBFloat16Group], state[kMaxStates][kBFloat16Group];
    load_bfloat16(halves(param.param) + i, values, kBFloat16Group);
    load_bfloat16(halves(param.grad) + i, grad, kBFloat16Group);
    for (int s = 0; s < Rule::kNumStates; ++s) load_bfloat16(halves(param.state[s]) + i, state[s], kBFloat16Group);
    LargestPrepared prepared;
    alignas(64) float before[kBFloat16Group], stored[kBFloat16Group];
    if constexpr (kMeasures) std::copy_n(values, kBFloat16Group, before);
    update_tile<Rule, false>(rule, factor, values, grad, state[0], state[1], state[2], state[3], kBFloat16Group,
                             prepared);
    if constexpr (kMeasures) measured.add(grad, before, values, kBFloat16Group);
    leave_grad(job.grad_scaling, param.grad, i, kBFloat16Group, grad);
    store_bfloat16(values, halves(param.param) + i, kBFloat16Group);
    if constexpr (kMeasures) {
      load_bfloat16(halves(param.param) + i, stored, kBFloat16Group);
      measured.compare(before, values, stored, kBFloat16Group);
    }
    for (int s = 0; s < Rule::kNumStates; ++s) store_bfloat16(state[s], halves(param.state[s]) + i, kBFloat16Group);
  }
  if constexpr (kMeasures) shared_measured = measured;
  return i;
}

#if defined(__AVX2__)
// Updates whole blocks of Adam from `begin` on while their states are block codes of finite values. Returns the first
// element that it left out. Loops are short chains of instructions, of which the processor works on many at once. It
// overlaps the chain that leads to a scale with the next block, because codes are stored after that.
template <class Rule, bool kMeasures>
[[gnu::flatten]] int64_t update_blocks(const Rule& shared_rule, const StepJob& job, const ParamJob& param,
                                       int64_t begin, int64_t end, Statistics<float>& shared_measured) {
  const Rule rule = shared_rule;
  const float factor = static_cast<float>(job.grad_scaling.factor);
  const TypedArray &means = param.state[0], &squares = param.state[1];
  const auto* mean_codes = static_cast<const int8_t*>(means.data);
  const auto* square_codes = static_cast<const uint8_t*>(squares.data);
  const auto* mean_scales = static_cast<const float*>(means.extra);
  const auto* square_scales = static_cast<const float*>(squares.extra);
  alignas(64) float scratch[2][kBlock], late_means[2][kBlock], late_squares[2][kBlock];
  LargestPrepared largest[2];
  Statistics<float> measured;
  const bool compares = kMeasures && may_lose(param.param.format);
  alignas(64) float before[kBlock], stored[kBlock];
  const auto store_codes = [&](int64_t index) {
    const int64_t turn = index / kBlock % 2;
    store_prepared<SignedCode>(means, index, kBlock, late_means[turn], largest[turn].largest[0]);
    store_prepared<SquaredCode>(squares, index, kBlock, late_squares[turn], largest[turn].largest[1]);
  };
  int64_t i = begin;
  for (; i + kBlock <= end && !has_special(mean_scales[i / kBlock]) && !has_special(square_scales[i / kBlock]);
       i += kBlock) {
    // The rule's loop reads what load_tile() leaves in place, and its chains are too long to reach far ahead.
    for (const TypedArray* array : {&param.param, &param.grad, &means, &squares}) {
      const int64_t bytes = is_native<float>(param.param) ? kBlock * bytes_of(array->format) : 0;
      const char* next = static_cast<const char*>(array->data) + (i / kBlock + 1) * bytes;
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at);
    }
    float *mean = late_means[i / kBlock % 2], *square = late_squares[i / kBlock % 2];
    float* values = load_tile(param.param, i, kBlock, scratch[0]);
    float* grad = load_tile(param.grad, i, kBlock, scratch[1]);
    const float mean_unit = SignedCode::unit_of(mean_scales[i / kBlock]);
    const float square_unit = SquaredCode::unit_of(square_scales[i / kBlock]);
    for (int k = 0; k < kBlock; k += sizeof(Lanes) / sizeof(float)) {
      Lanes state[kMaxStates] = {decode(mean_codes + i + k, mean_unit), decode(square_codes + i + k, square_unit)};
      Lanes value, gradient;
      std::memcpy(&value, values + k, sizeof(value));
      std::memcpy(&gradient, grad + k, sizeof(gradient));
      if constexpr (kMeasures) std::memcpy(before + k, &value, sizeof(value));
      rule(value, factor * gradient, state);
      state[1] = square_root(state[1]);
      std::memcpy(values + k, &value, sizeof(value));
      std::memcpy(mean + k, &state[0], sizeof(value));
      std::memcpy(square + k, &state[1], sizeof(value));
    }
    uint32_t largest_mean = 0, largest_square = 0;
    for (int k = 0; k < kBlock; ++k) {
      largest_mean = std::max(largest_mean, magnitude_bits(mean[k]));
      largest_square = std::max(largest_square, magnitude_bits(square[k]));
    }
    largest[i / kBlock % 2] = {{largest_mean, largest_square}};
    if constexpr (kMeasures) measured.add(grad, before, values, kBlock);
    leave_grad(job.grad_scaling, param.grad, i, kBlock, grad);
    store_tile(param.param, i, kBlock, values, param.key);
    if (compares) measured.compare(before, values, load_tile(param.param, i, kBlock, stored), kBlock);
    if (i > begin) store_codes(i - kBlock);
  }
  if constexpr (kMeasures) shared_measured = measured;
  if (i > begin) store_codes(i - kBlock);
  return i;
}
#endif

// Updates elements [begin, end) of a parameter. kCoded: its states have 8 bits. kMeasures: they are a part whose
// statistics the step measures.
template <template <class> class RuleOf, class T, bool kCoded, bool kMeasures>
void update_range(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end) {
  using Rule = RuleOf<T>;
  const Rule rule = rule_from<Rule>(job.rules[param.rule].template as<typename Rule::Args>());
  bool in_place = is_native<T>(param.param) && is_native<T>(param.grad);
  for (int s = 0; s < Rule::kNumStates; ++s) in_place &= is_native<T>(param.state[s]);
  // Tiles help only where values are converted or visited twice.
  const bool is_whole = in_place && job.grad_scaling.after == GradAfter::kKeep;
  const int64_t tile = kCoded ? kBlock : !is_whole ? kTile : kMeasures ? kBlock : end - begin;
  alignas(64) T scratch[2 + kMaxStates][kTile];
  const T factor = T(job.grad_scaling.factor);
  Statistics<T> measured;
  const int64_t chunk = param.first_chunk + begin / formats::kChunk;
  const bool compares = kMeasures && may_lose(param.param.format);
  alignas(64) T before[kTile];
  if constexpr (kHasBFloat16Vectors && std::is_same_v<T, float> && !kCoded) {
    if (is_all_bfloat16(param, Rule::kNumStates)) {
      begin = update_bfloat16<Rule, kMeasures>(rule, job, param, begin, end, measured);
    }
  }
#if defined(__AVX2__)
  if constexpr (kCoded && std::is_same_v<Rule, Adam<float>>) {
    if (param.state[0].format == Format::kSigned8) {
      begin = update_blocks<Rule, kMeasures>(rule, job, param, begin, end, measured);
    }
  }
#endif
  for (int64_t i = begin; i < end; i += tile) {
    const int64_t count = end - i < tile ? end - i : tile;
    T* values = load_tile(param.param, i, count, scratch[0]);
    T* grad = load_tile(param.grad, i, count, scratch[1]);
    T* state[kMaxStates] = {};
    for (int s = 0; s < Rule::kNumStates; ++s) {
      state[s] = load_state(param.state[s], param.rows, param.columns, i, count, scratch[2 + s]);
    }
    LargestPrepared prepared;
    if constexpr (kMeasures) {
      update_and_measure<Rule, kCoded>(rule, factor, before, values, grad, state, count, prepared, measured);
    } else {
      update_tile<Rule, kCoded>(rule, factor, values, grad, state[0], state[1], state[2], state[3], count, prepared);
    }
    leave_grad(job.grad_scaling, param.grad, i, count, grad);
    store_tile(param.param, i, count, values, param.key);
    if (compares) {
      alignas(64) T stored[kTile];
      measured.compare(before, values, load_tile(param.param, i, count, stored), count);
    }
    for (int s = 0; s < Rule::kNumStates; ++s) {
      if constexpr (kCoded) {
        store_prepared(param.state[s], i, count, state[s], prepared.largest[s]);
      } else {
        store_tile(param.state[s], i, count, state[s]);
      }
    }
  }
  // Muon's first pass reads the gradient, and its second one steps the parameter.
  if constexpr (kMeasures) {
    measured.write(job.statistics[chunk], job.kind != RuleKind::kMuonStep, job.kind != RuleKind::kMuonMomentum);
  }
}

// Prefetches small parameters: they are finished before the processor recognizes their access pattern.
inline void prefetch_small(const ParamJob& param, int num_states) {
  constexpr int kLine = 64, kLines = 4;
  if (param.numel * bytes_of(param.param.format) > kLines * kLine) return;
  const auto prefetch = [&](const TypedArray& stream) {
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(static_cast<const char*>(stream.data) + i * kLine);
  };
  prefetch(param.param);
  prefetch(param.grad);
  for (int s = 0; s < num_states; ++s) prefetch(param.state[s]);
}

template <template <class> class RuleOf, bool kMeasures>
void loop_cpu(const StepJob& job, int64_t begin, int64_t end) {
  for (int32_t index = find_param(job, begin); index < job.num_params; ++index) {
    const ParamJob& param = job.params[index];
    if (param.begin >= end) break;
    if (index + 2 < job.num_params) prefetch_small(job.params[index + 2], RuleOf<float>::kNumStates);
    const int64_t from = begin > param.begin ? begin - param.begin : 0;
    const int64_t to = end - param.begin < param.numel ? end - param.begin : param.numel;
    if (job.in_double) {
      update_range<RuleOf, double, false, kMeasures>(job, param, from, to);
    } else if (RuleOf<float>::kNumStates > 0 && has_blocks(param.state[0].format)) {
      update_range<RuleOf, float, true, kMeasures>(job, param, from, to);
    } else {
      update_range<RuleOf, float, false, kMeasures>(job, param, from, to);
    }
  }
}

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::optim
