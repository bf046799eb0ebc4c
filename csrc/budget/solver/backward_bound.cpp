// Chooses op by op, from the last to the first, what is kept of its outputs, for many choices at a time. Where they
// become too many, those that are alike become one that may do what any of them may: a bound remains a bound.
#include "budget/solver/backward_bound.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "budget/solver/backward_choice.h"
#include "budget/solver/min_cut.h"

namespace drivetrain::budget {
namespace {

constexpr int32_t kNoUse = std::numeric_limits<int32_t>::max();
constexpr size_t kMaxOutputs = 3;  // of an op, the largest
constexpr int64_t kAnyBytes = std::numeric_limits<int64_t>::max();
constexpr int64_t kSmall = 2000;         // values of less than this part of the budget cost nothing
constexpr size_t kMaxCompared = 64;      // choices with which one is compared
constexpr int32_t kMaxPricedOps = 128;   // before how many ops seconds are priced
constexpr double kAlmostAll = 1 - 1e-9;  // of sums that are rounded

class BackwardBound {
 public:
  BackwardBound(const TraceIndex& index, int64_t budget_bytes, const BoundEffort& effort);
  double run();

 private:
  struct Output {
    int32_t value;
    Set bit;
    int64_t bytes;
    bool is_taken;
    int32_t first_take, last_release;
  };
  // The op to be decided.
  struct Now {
    int32_t op;
    std::vector<Output> outputs;  // those that are not small
    Set written, read;
    int64_t written_bytes, read_bytes;
    int32_t unseen_from;    // the use from which on it may be replayed for an output that is not among these
    bool may_be_seen_late;  // one of its outputs may have been read by a replay of which nothing is known
  };
  // What becomes of the outputs that are needed.
  struct Way {
    std::array<const Output*, kMaxOutputs> outputs;
    std::array<int8_t, kMaxOutputs> ways;
    size_t count = 0;
    bool is_replayed = false;
    bool is_asked = false;  // an output is, by a replay
    int32_t latest_replay = kNoUse;
  };

  bool is_small(int32_t value) const { return index_.trace.values[value].bytes <= budget_ / kSmall; }
  int32_t from_for_ops_before(int32_t op, int32_t from) const {
    return from < 0 || first_open_op_[from] >= op ? -1 : from;
  }
  Now now_at(int32_t op);
  void find_reads(Now& now);
  void decide(const Choice& before, const Now& now);
  void follow(const Choice& before, const Now& now, Way way);
  bool count_at(const Now& now, const Way& way, const Choice& before, Moment& moment) const;
  bool add_moments(const Now& now, const Way& way, Set asked_before, Choice& next) const;
  void price_the_rest(int32_t op);
  void drop_worse();
  bool merge_alike();

  const TraceIndex& index_;
  const int64_t budget_;
  const BoundEffort effort_;
  std::vector<int32_t> first_take_, last_release_;  // per value
  std::vector<int32_t> latest_replay_;              // per op: the last use for which it may be replayed
  std::vector<int32_t> next_take_;                  // per op: the first take of what is written by an op before it
  std::vector<int32_t> first_open_op_;              // per use: the first op of which an output is taken, not released
  std::vector<int8_t> slot_;                        // per value: its place in a set, -1: none
  std::vector<uint8_t> is_read_unseen_;             // per value: by an op that may be replayed and is not followed
  Set free_slots_ = ~Set{0};
  std::vector<Choice> choices_, next_;
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
      slot_(index.num_values(), -1),
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
    for (int32_t value : index.writes[op]) {
      const int32_t latest = index.is_taken[value] ? first_take_[value] : latest_read[value];
      latest_replay_[op] = std::max(latest_replay_[op], latest);
    }
    for (int32_t value : index.reads[op]) latest_read[value] = std::max(latest_read[value], latest_replay_[op]);
  }
  int32_t next_take = kNoUse;
  for (int32_t op = 0; op < index.num_ops(); ++op) {
    next_take_[op] = next_take;
    for (int32_t value : index.writes[op]) next_take = std::min(next_take, first_take_[value]);
  }
}

BackwardBound::Now BackwardBound::now_at(int32_t op) {
  const Trace& trace = index_.trace;
  Now now{op, {}, 0, 0, 0, 0, kNoUse, false};
  for (int32_t value : index_.writes[op]) {
    now.written_bytes += trace.values[value].bytes;
    if (!index_.may_be_needed[value] || is_small(value)) continue;
    now.outputs.push_back({value, slot_[value] < 0 ? 0 : Set{1} << slot_[value], trace.values[value].bytes,
                           index_.is_taken[value] != 0, first_take_[value], last_release_[value]});
  }
  std::stable_sort(now.outputs.begin(), now.outputs.end(),
                   [](const Output& a, const Output& b) { return a.bytes > b.bytes; });
  if (now.outputs.size() > kMaxOutputs) now.outputs.resize(kMaxOutputs);
  for (int32_t value : index_.writes[op]) {
    if (slot_[value] >= 0) now.written |= Set{1} << slot_[value];
    if (is_read_unseen_[value]) now.may_be_seen_late = true;
    const auto is_it = [&](const Output& output) { return output.value == value; };
    if (std::any_of(now.outputs.begin(), now.outputs.end(), is_it)) continue;
    now.unseen_from = std::min(now.unseen_from, first_take_[value]);
    if (slot_[value] >= 0) now.may_be_seen_late = true;
  }
  if (now.may_be_seen_late) now.unseen_from = 0;
  if (index_.may_be_replayed[op]) find_reads(now);
  for (int32_t value : index_.writes[op]) {
    if (slot_[value] >= 0) free_slots_ |= Set{1} << std::exchange(slot_[value], int8_t{-1});
  }
  return now;
}

void BackwardBound::find_reads(Now& now) {
  const auto written = index_.writes[now.op];
  for (int32_t value : index_.reads[now.op]) {
    const auto replaces_it = [&](int32_t output) { return index_.trace.values[output].replaces == value; };
    if (std::none_of(written.begin(), written.end(), replaces_it)) now.read_bytes += index_.trace.values[value].bytes;
    if (slot_[value] < 0 && !now.outputs.empty() && !is_small(value) && free_slots_ != 0) {
      slot_[value] = static_cast<int8_t>(std::countr_zero(free_slots_));
      free_slots_ &= free_slots_ - 1;
    }
    if (slot_[value] < 0 || now.outputs.empty()) {
      is_read_unseen_[value] = 1;
    } else {
      now.read |= Set{1} << slot_[value];
    }
  }
}

void BackwardBound::decide(const Choice& before, const Now& now) {
  Way way;
  for (const Output& output : now.outputs) {
    const bool is_asked = (before.asked & output.bit) != 0;
    if (!is_asked && !output.is_taken) continue;
    way.is_asked |= is_asked;
    way.ways[way.count] = kForget;
    way.outputs[way.count++] = &output;
  }
  if (way.count == 0) {
    next_.push_back(before);
    return;
  }
  for (size_t i = 0; i < way.count;) {
    follow(before, now, way);
    for (i = 0; i < way.count; ++i) {
      const auto num_forms = static_cast<int8_t>(index_.trace.values[way.outputs[i]->value].forms.size());
      if (++way.ways[i] <= num_forms) break;
      way.ways[i] = kForget;
    }
  }
}

void BackwardBound::follow(const Choice& before, const Now& now, Way way) {
  const Trace& trace = index_.trace;
  double form_seconds = 0;
  for (size_t i = 0; i < way.count; ++i) {
    const Output& output = *way.outputs[i];
    if (way.ways[i] != kForget) {
      if (!trace.values[output.value].can_keep) return;
      if (way.ways[i] > 0) form_seconds += trace.values[output.value].forms[way.ways[i] - 1].seconds;
      continue;
    }
    if (!index_.can_be_replayed[output.value]) return;
    way.is_replayed = true;
    way.latest_replay = std::min(way.latest_replay, output.is_taken ? output.first_take : latest_replay_[now.op]);
  }
  Choice next = before;
  // A replay for an output beside them brings back what is kept in a form, too.
  const bool is_alone = index_.writes[now.op].size() == 1;
  const double seconds = trace.ops[now.op].seconds;
  next.seconds += way.is_replayed ? seconds : is_alone ? form_seconds : std::min(form_seconds, seconds);
  next.least_seconds = std::max(next.least_seconds, next.seconds);
  if (next.least_seconds >= effort_.enough_seconds) return;
  for (Moment& moment : next.all()) {
    if (!count_at(now, way, before, moment)) return;
  }
  next.asked &= ~now.written;
  next.asked_before &= ~now.written;
  const Set asked_before = next.asked_before;
  if (way.is_replayed) {
    next.asked |= now.read;
    if (way.latest_replay < next_take_[now.op]) next.asked_before |= now.read;
  }
  if (add_moments(now, way, asked_before, next)) next_.push_back(next);
}

// What of the outputs is there at that moment; false: more than fits.
bool BackwardBound::count_at(const Now& now, const Way& way, const Choice& before, Moment& moment) const {
  bool is_replayed = false, may_be_replayed = way.is_replayed && now.unseen_from <= moment.use;
  for (size_t i = 0; i < way.count; ++i) {
    if (way.ways[i] != kForget) continue;
    const Output& output = *way.outputs[i];
    is_replayed |= (moment.asked & output.bit) != 0 || output.first_take <= moment.from;
    may_be_replayed |= (moment.maybe_asked & output.bit) != 0 || output.first_take <= moment.use;
  }
  for (size_t i = 0; i < way.count; ++i) {
    const Output& output = *way.outputs[i];
    if ((moment.counted & output.bit) != 0) continue;
    const bool is_back = (moment.asked & output.bit) != 0 || output.first_take <= moment.from;
    const bool is_due = output.last_release > moment.use;
    if (way.ways[i] == kForget) {
      if (is_replayed && is_due) moment.bytes_left -= output.bytes;
      continue;
    }
    const bool is_asked_later = (before.asked & ~moment.maybe_asked & output.bit) != 0;
    if (!is_due && !is_asked_later) continue;
    const int64_t bytes = index_.kept_bytes(output.value, way.ways[i]);
    const bool is_as_kept = way.ways[i] == 0 || moment.use < 0;
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

// The op's own replay, and when its outputs are taken; false: more than fits.
bool BackwardBound::add_moments(const Now& now, const Way& way, Set asked_before, Choice& next) const {
  if (way.is_replayed) {
    int64_t bytes_left = budget_ - now.written_bytes - now.read_bytes;
    for (size_t i = 0; i < way.count; ++i) {  // twice
      const bool is_there = way.ways[i] == 0 && way.outputs[i]->last_release > way.latest_replay;
      if (is_there) bytes_left -= way.outputs[i]->bytes;
    }
    if (bytes_left < 0) return false;
    const bool is_for_a_take = !way.is_asked && !now.may_be_seen_late;
    const bool is_for_these = is_for_a_take && now.unseen_from == kNoUse;
    next.remember({bytes_left, now.read | (is_for_a_take ? asked_before : 0), next.asked, now.read,
                   is_for_these ? from_for_ops_before(now.op, way.latest_replay) : -1, way.latest_replay});
  }
  for (size_t i = 0; i < way.count; ++i) {
    const Output& taken = *way.outputs[i];
    if (!taken.is_taken) continue;
    const bool is_replayed = way.is_replayed && way.latest_replay <= taken.first_take;
    int64_t bytes_left = budget_ - taken.bytes;
    for (size_t j = 0; j < way.count; ++j) {
      if (j == i || way.outputs[j]->last_release <= taken.first_take) continue;
      const bool is_there = way.ways[j] == 0 || (way.ways[j] == kForget && is_replayed);
      if (is_there) bytes_left -= way.outputs[j]->bytes;
    }
    if (bytes_left < 0) return false;
    next.remember({bytes_left, asked_before | (is_replayed ? now.read : 0), next.asked, 0,
                   from_for_ops_before(now.op, taken.first_take), taken.first_take});
  }
  return true;
}

// The ops before take at least what they take when bytes that they keep at the end of forward have a price.
void BackwardBound::price_the_rest(int32_t op) {
  KeepingCut cut(index_, op);
  constexpr int kFirst = -1, kEnd = 3;
  constexpr double kFactor = 2;
  for (int i = kFirst; i < kEnd; ++i) {
    const double price = effort_.price * std::pow(kFactor, i);
    const double bound = cut.at(price).bound * kAlmostAll;
    for (Choice& choice : next_) {
      const double rest = bound - price * static_cast<double>(choice.moments[0].bytes_left);
      choice.least_seconds = std::max(choice.least_seconds, choice.seconds + rest);
    }
  }
  std::erase_if(next_, [&](const Choice& choice) { return choice.least_seconds >= effort_.enough_seconds; });
}

// Their places, those with the same hash next to each other, the fastest first.
std::vector<std::pair<uint64_t, uint32_t>> ordered(std::span<const Choice> choices, int64_t bytes) {
  std::vector<std::pair<uint64_t, uint32_t>> order;
  for (const Choice& choice : choices) order.emplace_back(choice.hash(bytes), static_cast<uint32_t>(order.size()));
  const auto key = [&](const std::pair<uint64_t, uint32_t>& one) {
    const Choice& choice = choices[one.second];
    return std::tuple(one.first, choice.seconds, -choice.moments[0].bytes_left, one.second);
  };
  std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return order;
}

// Leaves out those of which another is better in every way.
void BackwardBound::drop_worse() {
  for (Choice& choice : next_) choice.forget_implied_moments();
  choices_.clear();
  size_t first = 0;
  uint64_t last_hash = 0;
  for (const auto& [hash, place] : ordered(next_, kAnyBytes)) {
    const Choice& choice = next_[place];
    if (hash != std::exchange(last_hash, hash)) first = choices_.size();
    bool is_worse = false;
    const size_t last_compared = choices_.size() - std::min(kMaxCompared, choices_.size() - first);
    for (size_t i = choices_.size(); i-- > last_compared && !is_worse;) {
      Choice& other = choices_[i];
      is_worse = other.has_sets_of(choice) && other.allows_more_than(choice);
      if (is_worse) other.allow_what_is_allowed_to(choice);  // of least_seconds the smaller holds for both
    }
    if (!is_worse) choices_.push_back(choice);
  }
}

// Leaves the half that is closest to the bound as it is; of the others, one for all with the same sets and about as
// many bytes left. False: there are too many sets.
bool BackwardBound::merge_alike() {
  const size_t half = effort_.num_choices / 2;
  if (choices_.size() <= 2 * half) return true;
  std::stable_sort(choices_.begin(), choices_.end(),
                   [](const Choice& a, const Choice& b) { return a.least_seconds < b.least_seconds; });
  std::vector<Choice> rest(choices_.begin() + static_cast<std::ptrdiff_t>(half), choices_.end());
  choices_.resize(half);
  for (grid_ = grid_ / 2 + 1; rest.size() > half && grid_ <= 2 * budget_; grid_ += grid_ / 2 + 1) {
    std::vector<Choice> merged;
    uint64_t last_hash = 0;
    for (const auto& [hash, place] : ordered(rest, grid_)) {
      const bool is_alike = hash == std::exchange(last_hash, hash) && !merged.empty();
      if (is_alike && merged.back().has_sets_of(rest[place])) {
        merged.back().allow_what_is_allowed_to(rest[place]);
      } else {
        merged.push_back(rest[place]);
      }
    }
    num_steps_ += static_cast<int64_t>(rest.size());
    rest = std::move(merged);
  }
  choices_.insert(choices_.end(), rest.begin(), rest.end());
  return rest.size() <= half;
}

double BackwardBound::run() {
  Choice& nothing = choices_.emplace_back();
  nothing.num_moments = 1;
  nothing.moments[0] = {budget_, 0, 0, 0, -1, -1};
  const int32_t stride = 1 + index_.num_ops() / kMaxPricedOps;
  for (int32_t op = index_.num_ops() - 1; op >= 0; --op) {
    const Now now = now_at(op);
    if (now.outputs.empty()) continue;
    next_.clear();
    for (const Choice& choice : choices_) decide(choice, now);
    num_steps_ += static_cast<int64_t>(next_.size());
    if (op % stride == 0) price_the_rest(op);
    drop_worse();
    if (!merge_alike() || num_steps_ > effort_.num_steps) break;
  }
  double least = effort_.enough_seconds;
  for (const Choice& choice : choices_) least = std::min(least, choice.least_seconds);
  return least * kAlmostAll;
}

}  // namespace

double bound_in_backward(const TraceIndex& index, int64_t budget_bytes, const BoundEffort& effort) {
  return BackwardBound(index, budget_bytes, effort).run();
}

}  // namespace drivetrain::budget
