// Estimates moves from the timeline of a step, and checks them with the simulator.
#include "budget/solver/local_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace drivetrain::budget {
namespace {

constexpr int kMaxRounds = 100;
constexpr size_t kMaxChain = 64;  // operations that the estimate of a move follows

}  // namespace

LocalSearch::LocalSearch(const TraceIndex& index, Simulator& simulator)
    : index_(index), simulator_(simulator), first_take_(index.num_values(), std::numeric_limits<int32_t>::max()) {
  for (int32_t use = index.num_uses() - 1; use >= 0; --use) {
    if (!index.trace.uses[use].is_release) first_take_[index.trace.uses[use].value] = use;
  }
}

double LocalSearch::with_error(double seconds) {
  if (error_ == 0) return seconds;
  const double share = static_cast<double>(random_()) / static_cast<double>(std::minstd_rand::max());
  return seconds * std::pow(1 + error_, 2 * share - 1);
}

void LocalSearch::count_needs(const Policy& policy) {
  needs_ = index_.num_releases;
  for (int32_t op = index_.num_ops() - 1; op >= 0; --op) {
    bool is_to_be_replayed = false;
    for (int32_t value : index_.writes[op]) is_to_be_replayed |= needs_[value] > 0 && policy[value] == kRecompute;
    if (!is_to_be_replayed) continue;
    for (int32_t value : index_.reads[op]) ++needs_[value];
  }
}

// Returns, per value, the first use that takes it or replays an operation that reads it.
std::vector<int32_t> LocalSearch::first_needs() const {
  std::vector<int32_t> first_need = first_take_;
  for (int32_t op = 0; op < index_.num_ops(); ++op) {
    if (timeline_.replayed_at[op] < 0) continue;
    for (int32_t value : index_.reads[op]) first_need[value] = std::min(first_need[value], timeline_.replayed_at[op]);
  }
  return first_need;
}

void LocalSearch::apply(const Move& move, Policy& policy) const {
  const int32_t op = index_.writer[move.value];
  if (move.entry == kSave && policy[move.value] == kRecompute) {
    for (int32_t value : index_.writes[op]) {
      if (index_.trace.values[value].can_save && policy[value] == kRecompute) policy[value] = kSave;
    }
  }
  policy[move.value] = move.entry;
  if (!move.saves_reads) return;
  for (int32_t read : index_.reads[op]) {
    if (needs_[read] == 0) policy[read] = kSave;
  }
}

Outcome LocalSearch::fill(int64_t budget_bytes, Policy& policy) {
  refused_.clear();
  Outcome outcome = simulator_.run(policy);
  for (int round = 0; round < kMaxRounds; ++round) {
    if (!fill_once(budget_bytes, policy, outcome)) break;
  }
  return outcome;
}

bool LocalSearch::fill_once(int64_t budget_bytes, Policy& policy, Outcome& outcome) {
  simulator_.run(policy, &timeline_);
  std::vector<Move> moves = moves_to_save(policy);
  const auto is_first = [](const Move& a, const Move& b) {
    const double left = a.seconds * static_cast<double>(std::max<int64_t>(b.bytes, 0));
    const double right = b.seconds * static_cast<double>(std::max<int64_t>(a.bytes, 0));
    return left != right ? left > right : a.value < b.value;
  };
  std::stable_sort(moves.begin(), moves.end(), is_first);
  peaks_up_to_ = timeline_.peak_bytes;
  for (size_t at = 1; at < peaks_up_to_.size(); ++at) {
    peaks_up_to_[at] = std::max(peaks_up_to_[at], peaks_up_to_[at - 1]);
  }
  std::vector<Move> fitting;
  std::vector<uint8_t> is_moved(index_.num_ops(), 0);
  for (const Move& move : moves) {
    uint8_t& is_op_moved = is_moved[index_.writer[move.value]];
    if (is_op_moved || !reserve(budget_bytes, move)) continue;
    is_op_moved = 1;
    fitting.push_back(move);
  }
  // Tries the better half of the moves as long as the estimates were wrong.
  while (!fitting.empty()) {
    Policy next = policy;
    for (const Move& move : fitting) apply(move, next);
    const Outcome found = simulator_.run(next);
    if (found.peak_bytes <= budget_bytes && found.seconds < outcome.seconds) {
      policy = std::move(next);
      outcome = found;
      return true;
    }
    if (fitting.size() == 1) refused_.insert(name(fitting[0]));
    fitting.resize(fitting.size() / 2);
  }
  return false;
}

std::vector<LocalSearch::Move> LocalSearch::moves_to_save(const Policy& policy) {
  count_needs(policy);
  std::vector<Move> moves;
  const auto add = [&](Move move) {
    if (move.seconds <= 0 || refused_.contains(name(move))) return;
    move.seconds = with_error(move.seconds);
    moves.push_back(move);
  };
  for (int32_t op = 0; op < index_.num_ops(); ++op) {
    if (timeline_.replayed_at[op] < 0) continue;
    Move move;
    move.until = timeline_.replayed_at[op];
    bool can_save = true;
    int num_outputs = 0;
    for (int32_t value : index_.writes[op]) {
      if (policy[value] != kRecompute || needs_[value] == 0) continue;
      ++num_outputs;
      can_save = can_save && index_.trace.values[value].can_save;
      move.value = value;
      move.bytes += index_.trace.values[value].bytes;
    }
    if (!can_save || num_outputs == 0) continue;
    const int64_t bytes = move.bytes;
    add_what_only_it_needs(policy, move);
    add(move);
    if (num_outputs > 1) continue;
    const std::vector<FormatPrice>& formats = index_.trace.values[move.value].formats;
    for (size_t format = 0; format < formats.size(); ++format) {
      Move packed = move;
      packed.entry = static_cast<int8_t>(format + 1);
      packed.bytes += formats[format].bytes - bytes;
      packed.seconds -= formats[format].seconds;
      add(packed);
    }
  }
  const std::vector<int32_t> first_need = first_needs();
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (policy[value] <= 0 || needs_[value] == 0 || first_need[value] >= index_.num_uses()) continue;
    const TraceValue& saved = index_.trace.values[value];
    const FormatPrice& format = saved.formats[policy[value] - 1];
    add({value, kSave, false, first_need[value], format.seconds, saved.bytes - format.bytes});
  }
  return moves;
}

// Adds the effect on operations and saved values that nothing but this move's operation needs.
void LocalSearch::add_what_only_it_needs(const Policy& policy, Move& move) {
  chain_.assign(1, index_.writer[move.value]);
  for (size_t at = 0; at < chain_.size() && at < kMaxChain; ++at) {
    move.seconds += index_.trace.ops[chain_[at]].seconds;
    for (int32_t value : index_.reads[chain_[at]]) {
      if (needs_[value] > 1) continue;
      if (policy[value] != kRecompute) {
        move.bytes -= index_.saved_bytes(value, policy[value]);
        continue;
      }
      const int32_t op = index_.writer[value];
      const auto is_for_others = [&](int32_t output) { return output != value && needs_[output] > 0; };
      const auto outputs = index_.writes[op];
      if (std::any_of(outputs.begin(), outputs.end(), is_for_others)) continue;
      if (std::find(chain_.begin(), chain_.end(), op) == chain_.end()) chain_.push_back(op);
    }
  }
}

// Returns whether the value fits until its use. If so, adds it to the peaks.
bool LocalSearch::reserve(int64_t budget_bytes, const Move& move) {
  const size_t last = static_cast<size_t>(move.until);  // peaks begin with the end of forward
  if (peaks_up_to_[last] + move.bytes > budget_bytes) return false;
  for (size_t at = 0; at <= last; ++at) peaks_up_to_[at] += move.bytes;
  for (size_t at = last + 1; at < peaks_up_to_.size() && peaks_up_to_[at] < peaks_up_to_[last]; ++at) {
    peaks_up_to_[at] = peaks_up_to_[last];
  }
  return true;
}

Outcome LocalSearch::evict(int64_t budget_bytes, Policy& policy) {
  Outcome outcome;
  for (int round = 0; round < kMaxRounds; ++round) {
    outcome = simulator_.run(policy, &timeline_);
    if (outcome.peak_bytes <= budget_bytes) break;
    const auto& peaks = timeline_.peak_bytes;
    const auto peak_at = static_cast<int32_t>(std::max_element(peaks.begin(), peaks.end()) - peaks.begin());
    std::vector<Move> moves = moves_to_drop(policy, peak_at - 1);
    const auto is_first = [](const Move& a, const Move& b) {
      const double left = a.seconds * static_cast<double>(b.bytes), right = b.seconds * static_cast<double>(a.bytes);
      return left != right ? left < right : a.bytes > b.bytes;
    };
    std::stable_sort(moves.begin(), moves.end(), is_first);
    if (moves.empty()) break;
    int64_t excess = outcome.peak_bytes - budget_bytes;
    std::vector<uint8_t> is_touched(index_.num_ops(), 0);
    for (const Move& move : moves) {
      const int32_t op = index_.writer[move.value];
      if (excess <= 0) break;
      if (is_touched[op]) continue;  // another move of the same operation
      is_touched[op] = 1;
      apply(move, policy);
      excess -= move.bytes;
    }
  }
  return outcome;
}

// Lists moves for values that are in memory during that use and needed only after it.
std::vector<LocalSearch::Move> LocalSearch::moves_to_drop(const Policy& policy, int32_t peak_at) {
  count_needs(policy);
  const std::vector<int32_t> first_need = first_needs();
  std::vector<Move> moves;
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (index_.is_external(value) || policy[value] == kRecompute || needs_[value] == 0) continue;
    if (first_need[value] <= peak_at) continue;
    const std::vector<FormatPrice>& formats = index_.trace.values[value].formats;
    const int64_t bytes = index_.saved_bytes(value, policy[value]);
    const double seconds = policy[value] == kSave ? 0 : formats[policy[value] - 1].seconds;
    for (size_t format = 0; format < formats.size(); ++format) {
      Move packed{value, static_cast<int8_t>(format + 1), false, 0, formats[format].seconds - seconds, 0};
      packed.bytes = bytes - formats[format].bytes;
      if (packed.bytes > 0) moves.push_back(packed);
    }
    if (!index_.can_recompute[value]) continue;
    Move replayed{value, kRecompute, false, 0, -seconds, bytes};
    if (add_what_it_would_need(policy, replayed)) moves.push_back(replayed);
    const int32_t op = index_.writer[value];
    Move exchanged{value, kRecompute, true, 0, index_.trace.ops[op].seconds - seconds, bytes};
    bool can_exchange = false;
    for (int32_t read : index_.reads[op]) {
      if (needs_[read] > 0) continue;
      can_exchange = index_.trace.values[read].can_save;
      if (!can_exchange) break;
      exchanged.bytes -= index_.trace.values[read].bytes;
    }
    if (can_exchange && exchanged.bytes > 0) moves.push_back(exchanged);
  }
  for (Move& move : moves) move.seconds = with_error(move.seconds);
  return moves;
}

// Adds the operations that would have to be replayed and are not replayed now. Returns false if the move is impossible.
bool LocalSearch::add_what_it_would_need(const Policy& policy, Move& move) {
  chain_.assign(1, index_.writer[move.value]);
  for (size_t at = 0; at < chain_.size(); ++at) {
    if (at == kMaxChain) return false;
    if (timeline_.replayed_at[chain_[at]] < 0) move.seconds += index_.trace.ops[chain_[at]].seconds;
    for (int32_t value : index_.reads[chain_[at]]) {
      if (needs_[value] > 0) continue;
      if (policy[value] != kRecompute) {
        move.bytes -= index_.saved_bytes(value, policy[value]);
      } else if (!index_.can_recompute[value]) {
        return false;
      } else if (std::find(chain_.begin(), chain_.end(), index_.writer[value]) == chain_.end()) {
        chain_.push_back(index_.writer[value]);
      }
    }
  }
  return move.bytes > 0;
}

}  // namespace drivetrain::budget
