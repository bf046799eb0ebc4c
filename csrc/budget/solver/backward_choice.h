// What a bound on the seconds knows of the ops that it has decided: many such at a time, of which those that are alike
// can become one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>

#include "base/hash.h"

namespace drivetrain::budget {

using Set = uint64_t;  // of values that cross: read by an op that is decided, written by one that is not

// A moment at which everything must fit: the end of forward, after a take, or during a replay.
struct Moment {
  int64_t bytes_left;  // for what is written by ops that are not decided
  Set asked;           // values that a replay has read by then: there, while needed
  Set maybe_asked;     // these, and those that a replay may have read by then
  Set counted;         // those whose bytes bytes_left is without
  int32_t from;        // the moment is not before this use; -1: not said, or all the same for what is not decided
  int32_t use;         // the moment is not after this use; -1: the end of forward

  // As good as: whatever fits then fits at this moment, too.
  bool is_implied_by(const Moment& other) const {
    return (asked & ~other.asked) == 0 && other.from >= from && other.bytes_left <= bytes_left;
  }
  auto sets() const { return std::tie(asked, maybe_asked, counted); }
};

// What was chosen for the ops that are decided, as far as the others need to know.
struct Choice {
  static constexpr size_t kMaxMoments = 4;  // that it remembers

  double seconds = 0;
  double least_seconds = 0;  // with the least that the other ops take
  Set asked = 0;             // values that replays read
  Set asked_before = 0;      // these, if surely before anything is taken that is written by ops before the reader
  uint32_t num_moments = 0;
  std::array<Moment, kMaxMoments> moments{};  // the first is the end of forward

  std::span<Moment> all() { return {moments.data(), num_moments}; }
  std::span<const Moment> all() const { return {moments.data(), num_moments}; }

  bool has_sets_of(const Choice& other) const {
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
  // The same for all that have the same sets and, in so many bytes, as many left.
  uint64_t hash(int64_t bytes) const {
    uint64_t hash = 0xcbf29ce484222325;
    hash = mix(mix(hash, asked), asked_before);
    for (const Moment& moment : all()) {
      hash = mix(mix(mix(hash, moment.asked), moment.maybe_asked), moment.counted);
      hash = mix(hash, static_cast<uint64_t>(moment.bytes_left / bytes));
    }
    return hash;
  }
  // Whatever the other may still do, this may.
  bool allows_more_than(const Choice& other) const {
    for (uint32_t i = 0; i < num_moments; ++i) {
      const Moment &mine = moments[i], &theirs = other.moments[i];
      if (mine.bytes_left < theirs.bytes_left || mine.from > theirs.from || mine.use < theirs.use) return false;
    }
    return seconds <= other.seconds;
  }
  void allow_what_is_allowed_to(const Choice& other) {
    seconds = std::min(seconds, other.seconds);
    least_seconds = std::min(least_seconds, other.least_seconds);
    for (uint32_t i = 0; i < num_moments; ++i) {
      moments[i].bytes_left = std::max(moments[i].bytes_left, other.moments[i].bytes_left);
      moments[i].from = std::min(moments[i].from, other.moments[i].from);
      moments[i].use = std::max(moments[i].use, other.moments[i].use);
    }
  }
  // To forget a moment is to allow more; the tightest are remembered.
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
