// Sums up what a step measures while its loop has the values in registers or in the cache. Only for files that are
// compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <type_traits>

#include "formats/tile_cpu.h"
#include "optim/step.h"

namespace drivetrain::optim {
inline namespace DRIVETRAIN_ISA {

// The sums in double over the elements of a part, by slots that vectors fill. Element i belongs to slot i %
// kStatisticsSlots, and slots are added in order, so that sums have the same bits on every instruction set.
constexpr int kStatisticsSlots = 8;

template <class T>
auto bits_of_magnitude(T value) {
  using Bits = std::conditional_t<sizeof(T) == sizeof(float), uint32_t, uint64_t>;
  return bits_as<Bits>(value) & (~Bits(0) >> 1);
}

// Adds vectors of as many elements: of the gradient, of the parameter before the step, and of the rule's result.
// `recent` has magnitudes of the gradient since the last end_add(). They compare as their bits do.
template <class T>
struct StatisticsSlots {
  struct Vector {
    T of[kStatisticsSlots];
  };
  alignas(64) double grad[kStatisticsSlots] = {}, update[kStatisticsSlots] = {}, param[kStatisticsSlots] = {};
  alignas(64) decltype(bits_of_magnitude(T())) recent[kStatisticsSlots] = {}, largest[kStatisticsSlots] = {};
  int32_t changed[kStatisticsSlots] = {}, lost[kStatisticsSlots] = {};

  void add(const Vector& of_grad, const Vector& before, const Vector& exact) {
    for (int i = 0; i < kStatisticsSlots; ++i) {
      const double wide_grad = of_grad.of[i], wide_update = exact.of[i] - before.of[i], wide_param = before.of[i];
      grad[i] += wide_grad * wide_grad;
      update[i] += wide_update * wide_update;
      param[i] += wide_param * wide_param;
      recent[i] = std::max(recent[i], bits_of_magnitude(of_grad.of[i]));
    }
  }
  void compare(const Vector& before, const Vector& exact, const Vector& stored) {
    for (int i = 0; i < kStatisticsSlots; ++i) {
      const int32_t changes = exact.of[i] != before.of[i];
      changed[i] += changes;
      lost[i] += changes & (stored.of[i] == before.of[i]);
    }
  }
  bool has_infinite() const {
    return *std::max_element(recent, recent + kStatisticsSlots) >= bits_of_magnitude(static_cast<T>(INFINITY));
  }
  void keep_recent() {
    for (int i = 0; i < kStatisticsSlots; ++i) largest[i] = std::max(largest[i], recent[i]);
  }
};

#if defined(__AVX2__)
// A float's square is exact in double, so that a fused addition has the bits of another.
template <>
struct StatisticsSlots<float> {
  using Vector = Lanes;
#if defined(__AVX512F__)
  using Sums = __m512d;
  static void add_squares(Lanes values, Sums& to) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(values));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1));
    to = _mm512_fmadd_pd(high, high, _mm512_fmadd_pd(low, low, to));
  }
  static LaneWords larger(LaneWords a, LaneWords b) { return _mm512_max_epi32(a, b); }
  void compare(Lanes before, Lanes exact, Lanes stored) {
    const LaneWords one = _mm512_set1_epi32(1);
    const __mmask16 changes = _mm512_cmp_ps_mask(exact, before, _CMP_NEQ_UQ);
    const __mmask16 loses = _mm512_mask_cmp_ps_mask(changes, stored, before, _CMP_EQ_OQ);
    changed = _mm512_mask_add_epi32(changed, changes, changed, one);
    lost = _mm512_mask_add_epi32(lost, loses, lost, one);
  }
  bool has_infinite() const { return _mm512_cmpge_epi32_mask(recent, _mm512_set1_epi32(kInfinity)) != 0; }
#else
  struct Sums {
    __m256d low, high;
  };
  static void add_squares(Lanes values, Sums& to) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
    to = {_mm256_fmadd_pd(low, low, to.low), _mm256_fmadd_pd(high, high, to.high)};
  }
  static LaneWords larger(LaneWords a, LaneWords b) { return _mm256_max_epi32(a, b); }
  void compare(Lanes before, Lanes exact, Lanes stored) {
    const LaneWords changes = _mm256_castps_si256(_mm256_cmp_ps(exact, before, _CMP_NEQ_UQ));
    const LaneWords keeps = _mm256_castps_si256(_mm256_cmp_ps(stored, before, _CMP_EQ_OQ));
    changed = _mm256_sub_epi32(changed, changes);
    lost = _mm256_sub_epi32(lost, _mm256_and_si256(changes, keeps));
  }
  bool has_infinite() const {
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(recent, _mm256_set1_epi32(kInfinity - 1))) != 0;
  }
#endif
  Sums grad = {}, update = {}, param = {};
  LaneWords recent = {}, largest = {}, changed = {}, lost = {};

  void add(Lanes of_grad, Lanes before, Lanes exact) {
    add_squares(of_grad, grad);
    add_squares(exact - before, update);
    add_squares(before, param);
    recent = larger(recent, reinterpret_cast<LaneWords>(reinterpret_cast<LaneIntegers>(of_grad) & INT32_MAX));
  }
  void keep_recent() { largest = larger(largest, recent); }
};
#endif

template <class T>
struct Statistics : StatisticsSlots<T> {
  using Slots = StatisticsSlots<T>;
  using Vector = typename Slots::Vector;
  using Bits = decltype(bits_of_magnitude(T()));
  static constexpr int kWidth = sizeof(Vector) / sizeof(T);
  Bits largest_of_others = 0;  // magnitude of finite elements near others that are not
  int64_t not_finite = 0;

  static Vector vector_of(const T* from) {
    Vector result;
    memcpy(&result, from, sizeof(result));
    return result;
  }

  // Calls use() for vectors of three arrays. Zeros fill the last ones, because they change no sum.
  template <class Use>
  [[gnu::always_inline]] static void for_vectors(int64_t count, const T* a, const T* b, const T* c, const Use& use) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) use(vector_of(a + i), vector_of(b + i), vector_of(c + i));
    if (i == count) return;
    T rest[3][kWidth] = {};
    std::copy(a + i, a + count, rest[0]);
    std::copy(b + i, b + count, rest[1]);
    std::copy(c + i, c + count, rest[2]);
    use(vector_of(rest[0]), vector_of(rest[1]), vector_of(rest[2]));
  }

  // Adds elements of the gradient, of the parameter before the step, and of the rule's result.
  using Slots::add;
  [[gnu::always_inline]] void add(const T* of_grad, const T* before, const T* exact, int64_t count) {
    for_vectors(count, of_grad, before, exact,
                [&](const Vector& a, const Vector& b, const Vector& c) { Slots::add(a, b, c); });
    end_add(of_grad, count);
  }

  // Follows the addition of these elements of the gradient.
  void end_add(const T* of_grad, int64_t count) {
    if (!Slots::has_infinite()) [[likely]] {
      Slots::keep_recent();
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const Bits magnitude = bits_of_magnitude(of_grad[i]);
        const bool is_finite = magnitude < bits_of_magnitude(static_cast<T>(INFINITY));
        if (is_finite) largest_of_others = std::max(largest_of_others, magnitude);
        not_finite += is_finite ? 0 : 1;
      }
    }
    memset(&this->recent, 0, sizeof(this->recent));
  }

  // Counts elements that the rule has changed, and how many of them are stored as before.
  using Slots::compare;
  [[gnu::always_inline]] void compare(const T* before, const T* exact, const T* stored, int64_t count) {
    for_vectors(count, before, exact, stored,
                [&](const Vector& a, const Vector& b, const Vector& c) { Slots::compare(a, b, c); });
  }

  // Writes the sums over the gradient of a part, and those over its parameter.
  void write(ChunkStatistics& to, bool has_grad, bool has_param) const {
    const auto joined = [](const auto& slots, auto first, const auto& join) {
      decltype(first) all[sizeof(slots) / (sizeof(first))];
      memcpy(all, &slots, sizeof(all));
      return std::accumulate(std::begin(all), std::end(all), first, join);
    };
    if (has_grad) {
      to.grad = joined(this->grad, 0.0, std::plus());
      to.largest = bits_as<T>(joined(this->largest, largest_of_others, [](Bits a, Bits b) { return std::max(a, b); }));
      to.not_finite = not_finite;
    }
    if (has_param) {
      to.update = joined(this->update, 0.0, std::plus());
      to.param = joined(this->param, 0.0, std::plus());
      to.changed = joined(this->changed, int32_t(0), std::plus());
      to.lost = joined(this->lost, int32_t(0), std::plus());
    }
  }
};

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::optim
