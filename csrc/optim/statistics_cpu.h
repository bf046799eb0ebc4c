// Sums up what a step measures, element by element as the loop updates them. Only for files that are compiled once per
// instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#include "formats/tile_cpu.h"
#include "optim/step.h"

namespace drivetrain::optim {
inline namespace DRIVETRAIN_ISA {

// Sums in double over the elements of a part, by slots that vectors fill. Element i belongs to slot i %
// kStatisticsSlots, and slots are added in order, so that sums have the same bits on every instruction set.
constexpr int kStatisticsSlots = 16;
template <class T>
struct StatisticsSlots {
  using Bits = std::conditional_t<sizeof(T) == sizeof(float), uint32_t, uint64_t>;
  alignas(64) double grad[kStatisticsSlots] = {}, update[kStatisticsSlots] = {}, param[kStatisticsSlots] = {};
  alignas(64) Bits largest[kStatisticsSlots] = {};  // of finite gradients: magnitudes, which compare as their bits do
  alignas(64) Bits not_finite[kStatisticsSlots] = {};
  int64_t changed = 0, lost = 0;  // see compare()

  static Bits magnitude(T value) {
    Bits bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits & (~Bits(0) >> 1);
  }

  void add(int slot, T of_grad, T before, T after) {
    const double wide_grad = of_grad, wide_update = after - before, wide_param = before;
    grad[slot] += wide_grad * wide_grad;
    update[slot] += wide_update * wide_update;
    param[slot] += wide_param * wide_param;
    const Bits bits = magnitude(of_grad), is_finite = bits < magnitude(static_cast<T>(INFINITY));
    not_finite[slot] += 1 - is_finite;
    largest[slot] = std::max(largest[slot], is_finite * bits);
  }
};

// Counts elements that the rule has changed, and how many of them are stored as before. Not inlined, because the
// compiler would unroll it into shuffles where the count is known.
template <class T>
[[gnu::noinline]] void compare(const T* __restrict before, const T* __restrict exact, const T* __restrict stored,
                               int64_t count, StatisticsSlots<T>& to) {
  int32_t changed = 0, lost = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t changes = exact[i] != before[i];
    changed += changes;
    lost += changes & (stored[i] == before[i]);
  }
  to.changed += changed;
  to.lost += lost;
}

// Writes the sums over the gradient of a part, and those over its parameter.
template <class T>
void write(const StatisticsSlots<T>& slots, ChunkStatistics& to, bool has_grad, bool has_param) {
  const auto sum = [](const auto& of) { return std::accumulate(of, of + kStatisticsSlots, 0 * of[0]); };
  if (has_grad) {
    to.grad = sum(slots.grad);
    const auto largest = *std::max_element(slots.largest, slots.largest + kStatisticsSlots);
    T value;
    memcpy(&value, &largest, sizeof(value));
    to.largest = value;
    to.not_finite = sum(slots.not_finite);
  }
  if (has_param) {
    to.update = sum(slots.update);
    to.param = sum(slots.param);
    to.changed = slots.changed;
    to.lost = slots.lost;
  }
}

}  // namespace DRIVETRAIN_ISA
}  // namespace drivetrain::optim
