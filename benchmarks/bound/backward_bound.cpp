// Decides operation by operation, from the last to the first, which outputs to save, for many states at a time. Where
// states become too many, merges similar ones into one that allows what any of them allows, so the bound stays valid.
#include "backward_bound.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "bound_state.h"
#include "budget/solver/min_cut.h"

namespace drivetrain::budget {
namespace {

constexpr int32_t kNoUse = std::numeric_limits<int32_t>::max();
constexpr size_t kMaxOutputs = 3;  // of an operation, the largest ones
constexpr int64_t kAnyBytes = std::numeric_limits<int64_t>::max();
constexpr int64_t kSmall = 2000;         // values below this fraction of the budget count as 0 bytes
constexpr size_t kMaxCompared = 64;      // states with which one is compared
constexpr int32_t kMaxPricedOps = 128;   // operations before which the rest is priced
constexpr double kAlmostAll = 1 - 1e-9;  // allows for rounding of sums

class BackwardBound {
 public:
  BackwardBound(const TraceIndex& index, int64_t budget_bytes, const BoundEffort& effort);
  double run();

 private:
  struct Output {
    int32_t value;
    ValueSet bit;
    int64_t bytes;
    bool is_taken;
    int32_t first_take, last_release;
  };
  // The operation to decide.
  struct Now {
    int32_t op;
    std::vector<Output> outputs;  // those that are not small
    ValueSet written, read;
    int64_t written_bytes, read_bytes;
    int32_t unseen_from;    // the use from which it may be replayed for an output that is not followed
    bool may_be_seen_late;  // a replay that is not followed may read one of its outputs
  };
  // A decision for the needed outputs.
  struct Decision {
    std::array<const Output*, kMaxOutputs> outputs;
    std::array<int8_t, kMaxOutputs> entries;
    size_t count = 0;
    bool is_replayed = false;
    bool is_asked = false;  // a replay reads an output
    int32_t latest_replay = kNoUse;
  };

  bool is_small(int32_t value) const { return index_.trace.values[value].bytes <= budget_ / kSmall; }
  int32_t from_for_ops_before(int32_t op, int32_t from) const {
    return from < 0 || first_open_op_[from] >= op ? -1 : from;
  }
  Now now_at(int32_t op);
  void find_reads(Now& now);
  void decide(const BoundState& before, const Now& now);
  void follow(const BoundState& before, const Now& now, Decision decision);
  bool count_at(const Now& now, const Decision& decision, const BoundState& before, Moment& moment) const;
  bool add_moments(const Now& now, const Decision& decision, ValueSet asked_before, BoundState& next) const;
  void price_the_rest(int32_t op);
  void drop_worse();
  bool merge_alike();

  const TraceIndex& index_;
  const int64_t budget_;
  const BoundEffort effort_;
  std::vector<int32_t> first_take_, last_release_;  // per value
  std::vector<int32_t> latest_replay_;              // per operation: the last use for which it may be replayed
  std::vector<int32_t> next_take_;                  // per operation: the first take of a value written before it
  std::vector<int32_t> first_open_op_;   // per use: the first operation with an output that is taken and not released
  std::vector<int8_t> bit_;              // per value: its bit in a set, -1: none
  std::vector<uint8_t> is_read_unseen_;  // per value: by an operation that may be replayed and is not followed
  ValueSet free_bits_ = ~ValueSet{0};
  std::vector<BoundState> states_, next_;
  int64_t num_steps_ = 0;
  int64_t grid_ = 1;
};

BackwardBound::BackwardBound(const TraceIndex& index, int64_t budget_bytes, const BoundEffort& effort)
    : index_(index),
      budget_(budget_bytes),
      effort_(effort),
      first_take_(index.num_values(), kNoUse),
      last_release_(index.num_values(), -1),
      latest_replay_(index.num_ops(), -1),
      next_take_(index.num_ops(), kNoUse),
      first_open_op_(index.num_uses(), index.num_ops()),
      bit_(index.num_values(), -1),
      is_read_unseen_(index.num_values(), 0) {
  for (int32_t use = index.num_uses() - 1; use >= 0; --use) {
    const auto& [value, is_release] = index.trace.uses[use];
    if (!is_release) first_take_[value] = use;
    if (is_release) last_release_[value] = std::max(last_release_[value], use);
  }
  for (int32_t value = 0; value < index.num_values(); ++value) {
    if (index.is_external(value) || is_small(value)) continue;
    for (int32_t use = first_take_[value]; use < last_release_[value]; ++use) {
      first_open_op_[use] = std::min(first_open_op_[use], index.writer[value]);
    }
  }
  std::vector<int32_t> latest_read(index.num_values(), -1);
  for (int32_t op = index.num_ops() - 1; op >= 0; --op) {
    if (!index.may_be_replayed[op]) continue;
    for (int32_t value : index.trace.ops[op].writes) {
      const int32_t latest = index.is_taken[value] ? first_take_[value] : latest_read[value];
      latest_replay_[op] = std::max(latest_replay_[op], latest);
    }
    for (int32_t value : index.reads[op]) latest_read[value] = std::max(latest_read[value], latest_replay_[op]);
  }
  int32_t next_take = kNoUse;
  for (int32_t op = 0; op < index.num_ops(); ++op) {
    next_take_[op] = next_take;
    for (int32_t value : index.trace.ops[op].writes) next_take = std::min(next_take, first_take_[value]);
  }
}

BackwardBound::Now BackwardBound::now_at(int32_t op) {
  const Trace& trace = index_.trace;
  Now now{op, {}, 0, 0, 0, 0, kNoUse, false};
  for (int32_t value : index_.trace.ops[op].writes) {
    now.written_bytes += trace.values[value].bytes;
    if (!index_.may_be_needed[value] || is_small(value)) continue;
    now.outputs.push_back({value, bit_[value] < 0 ? 0 : ValueSet{1} << bit_[value], trace.values[value].bytes,
                           index_.is_taken[value] != 0, first_take_[value], last_release_[value]});
  }
  std::stable_sort(now.outputs.begin(), now.outputs.end(),
                   [](const Output& a, const Output& b) { return a.bytes > b.bytes; });
  if (now.outputs.size() > kMaxOutputs) now.outputs.resize(kMaxOutputs);
  for (int32_t value : index_.trace.ops[op].writes) {
    if (bit_[value] >= 0) now.written |= ValueSet{1} << bit_[value];
    if (is_read_unseen_[value]) now.may_be_seen_late = true;
    const auto is_it = [&](const Output& output) { return output.value == value; };
    if (std::any_of(now.outputs.begin(), now.outputs.end(), is_it)) continue;
    now.unseen_from = std::min(now.unseen_from, first_take_[value]);
    if (bit_[value] >= 0) now.may_be_seen_late = true;
  }
  if (now.may_be_seen_late) now.unseen_from = 0;
  if (index_.may_be_replayed[op]) find_reads(now);
  for (int32_t value : index_.trace.ops[op].writes) {
    if (bit_[value] >= 0) free_bits_ |= ValueSet{1} << std::exchange(bit_[value], int8_t{-1});
  }
  return now;
}

void BackwardBound::find_reads(Now& now) {
  const auto& written = index_.trace.ops[now.op].writes;
  for (int32_t value : index_.reads[now.op]) {
    const auto replaces_it = [&](int32_t output) { return index_.trace.values[output].replaces == value; };
    if (std::none_of(written.begin(), written.end(), replaces_it)) now.read_bytes += index_.trace.values[value].bytes;
    if (bit_[value] < 0 && !now.outputs.empty() && !is_small(value) && free_bits_ != 0) {
      bit_[value] = static_cast<int8_t>(std::countr_zero(free_bits_));
      free_bits_ &= free_bits_ - 1;
    }
    if (bit_[value] < 0 || now.outputs.empty()) {
      is_read_unseen_[value] = 1;
    } else {
      now.read |= ValueSet{1} << bit_[value];
    }
  }
}

void BackwardBound::decide(const BoundState& before, const Now& now) {
  Decision decision;
  for (const Output& output : now.outputs) {
    const bool is_asked = (before.asked & output.bit) != 0;
    if (!is_asked && !output.is_taken) continue;
    decision.is_asked |= is_asked;
    decision.entries[decision.count] = kRecompute;
    decision.outputs[decision.count++] = &output;
  }
  if (decision.count == 0) {
    next_.push_back(before);
    return;
  }
  for (size_t i = 0; i < decision.count;) {
    follow(before, now, decision);
    for (i = 0; i < decision.count; ++i) {
      const auto num_formats = static_cast<int8_t>(index_.trace.values[decision.outputs[i]->value].formats.size());
      if (++decision.entries[i] <= num_formats) break;
      decision.entries[i] = kRecompute;
    }
  }
}

void BackwardBound::follow(const BoundState& before, const Now& now, Decision decision) {
  const Trace& trace = index_.trace;
  double format_seconds = 0;
  for (size_t i = 0; i < decision.count; ++i) {
    const Output& output = *decision.outputs[i];
    if (decision.entries[i] != kRecompute) {
      if (!trace.values[output.value].can_save) return;
      if (decision.entries[i] > 0)
        format_seconds += trace.values[output.value].formats[decision.entries[i] - 1].seconds;
      continue;
    }
    if (!index_.can_recompute[output.value]) return;
    decision.is_replayed = true;
    decision.latest_replay =
        std::min(decision.latest_replay, output.is_taken ? output.first_take : latest_replay_[now.op]);
  }
  BoundState next = before;
  // A replay for another output restores outputs in storage formats, too.
  const bool is_alone = index_.trace.ops[now.op].writes.size() == 1;
  const double seconds = trace.ops[now.op].seconds;
  next.seconds += decision.is_replayed ? seconds : is_alone ? format_seconds : std::min(format_seconds, seconds);
  next.least_seconds = std::max(next.least_seconds, next.seconds);
  if (next.least_seconds >= effort_.enough_seconds) return;
  for (Moment& moment : next.all()) {
    if (!count_at(now, decision, before, moment)) return;
  }
  next.asked &= ~now.written;
  next.asked_before &= ~now.written;
  const ValueSet asked_before = next.asked_before;
  if (decision.is_replayed) {
    next.asked |= now.read;
    if (decision.latest_replay < next_take_[now.op]) next.asked_before |= now.read;
  }
  if (add_moments(now, decision, asked_before, next)) next_.push_back(next);
}

// Subtracts the outputs that are in memory at that moment. Returns false if they do not fit.
bool BackwardBound::count_at(const Now& now, const Decision& decision, const BoundState& before, Moment& moment) const {
  bool is_replayed = false, may_be_replayed = decision.is_replayed && now.unseen_from <= moment.use;
  for (size_t i = 0; i < decision.count; ++i) {
    if (decision.entries[i] != kRecompute) continue;
    const Output& output = *decision.outputs[i];
    is_replayed |= (moment.asked & output.bit) != 0 || output.first_take <= moment.from;
    may_be_replayed |= (moment.maybe_asked & output.bit) != 0 || output.first_take <= moment.use;
  }
  for (size_t i = 0; i < decision.count; ++i) {
    const Output& output = *decision.outputs[i];
    if ((moment.counted & output.bit) != 0) continue;
    const bool is_back = (moment.asked & output.bit) != 0 || output.first_take <= moment.from;
    const bool is_due = output.last_release > moment.use;
    if (decision.entries[i] == kRecompute) {
      if (is_replayed && is_due) moment.bytes_left -= output.bytes;
      continue;
    }
    const bool is_asked_later = (before.asked & ~moment.maybe_asked & output.bit) != 0;
    if (!is_due && !is_asked_later) continue;
    const int64_t bytes = index_.saved_bytes(output.value, decision.entries[i]);
    const bool is_as_kept = decision.entries[i] == 0 || moment.use < 0;
    moment.bytes_left -= is_as_kept ? bytes : is_back ? output.bytes : std::min(bytes, output.bytes);
  }
  if (is_replayed) moment.asked |= now.read;
  if (may_be_replayed) moment.maybe_asked |= now.read;
  moment.asked &= ~now.written;
  moment.maybe_asked &= ~now.written;
  moment.counted &= ~now.written;
  moment.from = from_for_ops_before(now.op, moment.from);
  return moment.bytes_left >= 0;
}

// Adds the moments of the operation's replay and of its outputs' takes. Returns false if one does not fit.
bool BackwardBound::add_moments(const Now& now, const Decision& decision, ValueSet asked_before,
                                BoundState& next) const {
  if (decision.is_replayed) {
    int64_t bytes_left = budget_ - now.written_bytes - now.read_bytes;
    for (size_t i = 0; i < decision.count; ++i) {  // these are in memory twice
      const bool is_there = decision.entries[i] == 0 && decision.outputs[i]->last_release > decision.latest_replay;
      if (is_there) bytes_left -= decision.outputs[i]->bytes;
    }
    if (bytes_left < 0) return false;
    const bool is_for_a_take = !decision.is_asked && !now.may_be_seen_late;
    const bool is_for_these = is_for_a_take && now.unseen_from == kNoUse;
    next.remember({bytes_left, now.read | (is_for_a_take ? asked_before : 0), next.asked, now.read,
                   is_for_these ? from_for_ops_before(now.op, decision.latest_replay) : -1, decision.latest_replay});
  }
  for (size_t i = 0; i < decision.count; ++i) {
    const Output& taken = *decision.outputs[i];
    if (!taken.is_taken) continue;
    const bool is_replayed = decision.is_replayed && decision.latest_replay <= taken.first_take;
    int64_t bytes_left = budget_ - taken.bytes;
    for (size_t j = 0; j < decision.count; ++j) {
      if (j == i || decision.outputs[j]->last_release <= taken.first_take) continue;
      const bool is_there = decision.entries[j] == 0 || (decision.entries[j] == kRecompute && is_replayed);
      if (is_there) bytes_left -= decision.outputs[j]->bytes;
    }
    if (bytes_left < 0) return false;
    next.remember({bytes_left, asked_before | (is_replayed ? now.read : 0), next.asked, 0,
                   from_for_ops_before(now.op, taken.first_take), taken.first_take});
  }
  return true;
}

// Raises the bounds by the cost of the undecided operations where bytes saved at the end of forward have a price.
void BackwardBound::price_the_rest(int32_t op) {
  MinCut cut(index_, op);
  constexpr int kFirst = -1, kEnd = 3;
  constexpr double kFactor = 2;
  for (int i = kFirst; i < kEnd; ++i) {
    const double price = effort_.price * std::pow(kFactor, i);
    const double bound = cut.at(price).bound * kAlmostAll;
    for (BoundState& state : next_) {
      const double rest = bound - price * static_cast<double>(state.moments[0].bytes_left);
      state.least_seconds = std::max(state.least_seconds, state.seconds + rest);
    }
  }
  std::erase_if(next_, [&](const BoundState& state) { return state.least_seconds >= effort_.enough_seconds; });
}

// Returns hashes and indices of the states, sorted by hash, then by seconds.
std::vector<std::pair<uint64_t, uint32_t>> ordered(std::span<const BoundState> states, int64_t bytes) {
  std::vector<std::pair<uint64_t, uint32_t>> order;
  for (const BoundState& state : states) order.emplace_back(state.hash(bytes), static_cast<uint32_t>(order.size()));
  const auto key = [&](const std::pair<uint64_t, uint32_t>& one) {
    const BoundState& state = states[one.second];
    return std::tuple(one.first, state.seconds, -state.moments[0].bytes_left, one.second);
  };
  std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return order;
}

// Drops states that another state dominates.
void BackwardBound::drop_worse() {
  for (BoundState& state : next_) state.forget_implied_moments();
  states_.clear();
  size_t first = 0;
  uint64_t last_hash = 0;
  for (const auto& [hash, index] : ordered(next_, kAnyBytes)) {
    const BoundState& state = next_[index];
    if (hash != std::exchange(last_hash, hash)) first = states_.size();
    bool is_worse = false;
    const size_t last_compared = states_.size() - std::min(kMaxCompared, states_.size() - first);
    for (size_t i = states_.size(); i-- > last_compared && !is_worse;) {
      BoundState& other = states_[i];
      is_worse = other.has_sets_of(state) && other.allows_more_than(state);
      if (is_worse) other.allow_what_is_allowed_to(state);  // the smaller least_seconds is valid for both
    }
    if (!is_worse) states_.push_back(state);
  }
}

// Keeps the half with the lowest bounds as it is, and merges the others by sets and rounded bytes_left. Returns false
// if there are still too many.
bool BackwardBound::merge_alike() {
  const size_t half = effort_.num_states / 2;
  if (states_.size() <= 2 * half) return true;
  std::stable_sort(states_.begin(), states_.end(),
                   [](const BoundState& a, const BoundState& b) { return a.least_seconds < b.least_seconds; });
  std::vector<BoundState> rest(states_.begin() + static_cast<std::ptrdiff_t>(half), states_.end());
  states_.resize(half);
  for (grid_ = grid_ / 2 + 1; rest.size() > half && grid_ <= 2 * budget_; grid_ += grid_ / 2 + 1) {
    std::vector<BoundState> merged;
    uint64_t last_hash = 0;
    for (const auto& [hash, index] : ordered(rest, grid_)) {
      const bool is_alike = hash == std::exchange(last_hash, hash) && !merged.empty();
      if (is_alike && merged.back().has_sets_of(rest[index])) {
        merged.back().allow_what_is_allowed_to(rest[index]);
      } else {
        merged.push_back(rest[index]);
      }
    }
    num_steps_ += static_cast<int64_t>(rest.size());
    rest = std::move(merged);
  }
  states_.insert(states_.end(), rest.begin(), rest.end());
  return rest.size() <= half;
}

double BackwardBound::run() {
  BoundState& nothing = states_.emplace_back();
  nothing.num_moments = 1;
  nothing.moments[0] = {budget_, 0, 0, 0, -1, -1};
  const int32_t stride = 1 + index_.num_ops() / kMaxPricedOps;
  for (int32_t op = index_.num_ops() - 1; op >= 0; --op) {
    const Now now = now_at(op);
    if (now.outputs.empty()) continue;
    next_.clear();
    for (const BoundState& state : states_) decide(state, now);
    num_steps_ += static_cast<int64_t>(next_.size());
    if (op % stride == 0) price_the_rest(op);
    drop_worse();
    if (!merge_alike() || num_steps_ > effort_.num_steps) break;
  }
  double least = effort_.enough_seconds;
  for (const BoundState& state : states_) least = std::min(least, state.least_seconds);
  return least * kAlmostAll;
}

}  // namespace

double bound_in_backward(const TraceIndex& index, int64_t budget_bytes, const BoundEffort& effort) {
  return BackwardBound(index, budget_bytes, effort).run();
}

}  // namespace drivetrain::budget
