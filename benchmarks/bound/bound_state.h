// Declares the state of the bound in backward: a choice for the operations decided so far. Similar states can be
// merged.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>

#include "base/hash.h"

namespace drivetrain::budget {

using ValueSet = uint64_t;  // values written by undecided operations and read by decided ones

// A time at which memory must fit: the end of forward, after a take, or during a replay.
struct Moment {
  int64_t bytes_left;    // for outputs of undecided operations
  ValueSet asked;        // values that a replay has read by then: in memory while needed
  ValueSet maybe_asked;  // these, and values that a replay may have read by then
  ValueSet counted;      // values whose bytes are already subtracted from bytes_left
  int32_t from;          // the moment is not before this use; -1: unknown or irrelevant for undecided operations
  int32_t use;           // the moment is not after this use; -1: the end of forward

  // Returns true if everything that fits at the other moment fits at this one.
  bool is_implied_by(const Moment& other) const {
    return (asked & ~other.asked) == 0 && other.from >= from && other.bytes_left <= bytes_left;
  }
  auto sets() const { return std::tie(asked, maybe_asked, counted); }
};

struct BoundState {
  static constexpr size_t kMaxMoments = 4;  // remembered at most

  double seconds = 0;
  double least_seconds = 0;   // with a lower bound for the undecided operations
  ValueSet asked = 0;         // values that replays read
  ValueSet asked_before = 0;  // values certainly read before any take of a value written before the reader
  uint32_t num_moments = 0;
  std::array<Moment, kMaxMoments> moments{};  // the first is the end of forward

  std::span<Moment> all() { return {moments.data(), num_moments}; }
  std::span<const Moment> all() const { return {moments.data(), num_moments}; }

  bool has_sets_of(const BoundState& other) const {
    const auto are_same = [](const Moment& a, const Moment& b) { return a.sets() == b.sets(); };
    return asked == other.asked && asked_before == other.asked_before &&
           std::equal(all().begin(), all().end(), other.all().begin(), other.all().end(), are_same);
  }
  void forget_implied_moments() {
    uint32_t left = 1;
    for (uint32_t i = 1; i < num_moments; ++i) {
      const Moment moment = moments[i];
      const auto implies_it = [&](const Moment& other) { return moment.is_implied_by(other); };
      const auto others = all();
      if (std::any_of(others.begin(), others.begin() + left, implies_it)) continue;
      if (std::any_of(others.begin() + i + 1, others.end(), implies_it)) continue;
      moments[left++] = moment;
    }
    num_moments = left;
    std::sort(moments.begin() + 1, moments.begin() + num_moments,
              [](const Moment& a, const Moment& b) { return std::pair(a.sets(), a.use) < std::pair(b.sets(), b.use); });
  }
  // Equal for states with equal sets whose bytes_left are equal when rounded to multiples of `bytes`.
  uint64_t hash(int64_t bytes) const {
    uint64_t hash = 0xcbf29ce484222325;
    hash = mix(mix(hash, asked), asked_before);
    for (const Moment& moment : all()) {
      hash = mix(mix(mix(hash, moment.asked), moment.maybe_asked), moment.counted);
      hash = mix(hash, static_cast<uint64_t>(moment.bytes_left / bytes));
    }
    return hash;
  }
  // Returns true if this state allows every continuation of the other.
  bool allows_more_than(const BoundState& other) const {
    for (uint32_t i = 0; i < num_moments; ++i) {
      const Moment &mine = moments[i], &theirs = other.moments[i];
      if (mine.bytes_left < theirs.bytes_left || mine.from > theirs.from || mine.use < theirs.use) return false;
    }
    return seconds <= other.seconds;
  }
  void allow_what_is_allowed_to(const BoundState& other) {
    seconds = std::min(seconds, other.seconds);
    least_seconds = std::min(least_seconds, other.least_seconds);
    for (uint32_t i = 0; i < num_moments; ++i) {
      moments[i].bytes_left = std::max(moments[i].bytes_left, other.moments[i].bytes_left);
      moments[i].from = std::min(moments[i].from, other.moments[i].from);
      moments[i].use = std::max(moments[i].use, other.moments[i].use);
    }
  }
  // Remembers the tightest moments. Forgetting one allows more, so the bound stays valid.
  void remember(const Moment& added) {
    for (const Moment& moment : all()) {
      if (added.is_implied_by(moment)) return;
    }
    if (num_moments < kMaxMoments) {
      moments[num_moments++] = added;
      return;
    }
    const auto roomiest = std::max_element(moments.begin() + 1, moments.end(), [](const Moment& a, const Moment& b) {
      return a.bytes_left < b.bytes_left;
    });
    if (added.bytes_left < roomiest->bytes_left) *roomiest = added;
  }
};

}  // namespace drivetrain::budget
