// Finds room and its lack in the timeline of a step by estimates, and checks with the simulator.
#include "budget/solver/local_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace drivetrain::budget {
namespace {

constexpr int kMaxRounds = 100;
constexpr size_t kMaxChain = 64;  // ops of which a move takes account

}  // namespace

Polish::Polish(const TraceIndex& index, Simulator& simulator)
    : index_(index), simulator_(simulator), first_take_(index.num_values(), std::numeric_limits<int32_t>::max()) {
  for (int32_t use = index.num_uses() - 1; use >= 0; --use) {
    if (!index.trace.uses[use].is_release) first_take_[index.trace.uses[use].value] = use;
  }
}

double Polish::misjudged(double seconds) {
  if (error_ == 0) return seconds;
  const double share = static_cast<double>(random_()) / static_cast<double>(std::minstd_rand::max());
  return seconds * std::pow(1 + error_, 2 * share - 1);
}

void Polish::count_needs(const Keeping& keeping) {
  needs_ = index_.num_tickets;
  for (int32_t op = index_.num_ops() - 1; op >= 0; --op) {
    bool is_to_be_replayed = false;
    for (int32_t value : index_.writes[op]) is_to_be_replayed |= needs_[value] > 0 && keeping[value] == kForget;
    if (!is_to_be_replayed) continue;
    for (int32_t value : index_.reads[op]) ++needs_[value];
  }
}

// Per value: the first use that takes it, or replays an op that reads it.
std::vector<int32_t> Polish::first_needs() const {
  std::vector<int32_t> first_need = first_take_;
  for (int32_t op = 0; op < index_.num_ops(); ++op) {
    if (timeline_.replayed_at[op] < 0) continue;
    for (int32_t value : index_.reads[op]) first_need[value] = std::min(first_need[value], timeline_.replayed_at[op]);
  }
  return first_need;
}

void Polish::apply(const Move& move, Keeping& keeping) const {
  const int32_t op = index_.writer[move.value];
  if (move.way == 0 && keeping[move.value] == kForget) {
    for (int32_t value : index_.writes[op]) {
      if (index_.trace.values[value].can_keep && keeping[value] == kForget) keeping[value] = 0;
    }
  }
  keeping[move.value] = move.way;
  if (!move.keeps_reads) return;
  for (int32_t read : index_.reads[op]) {
    if (needs_[read] == 0) keeping[read] = 0;
  }
}

Outcome Polish::fill(int64_t budget_bytes, Keeping& keeping) {
  refused_.clear();
  Outcome outcome = simulator_.run(keeping);
  for (int round = 0; round < kMaxRounds; ++round) {
    if (!fill_once(budget_bytes, keeping, outcome)) break;
  }
  return outcome;
}

bool Polish::fill_once(int64_t budget_bytes, Keeping& keeping, Outcome& outcome) {
  simulator_.run(keeping, &timeline_);
  std::vector<Move> moves = moves_to_keep(keeping);
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
  // Whatever the estimates had wrong shows now; the first half of the moves may be right.
  while (!fitting.empty()) {
    Keeping next = keeping;
    for (const Move& move : fitting) apply(move, next);
    const Outcome found = simulator_.run(next);
    if (found.peak_bytes <= budget_bytes && found.seconds < outcome.seconds) {
      keeping = std::move(next);
      outcome = found;
      return true;
    }
    if (fitting.size() == 1) refused_.insert(name(fitting[0]));
    fitting.resize(fitting.size() / 2);
  }
  return false;
}

std::vector<Polish::Move> Polish::moves_to_keep(const Keeping& keeping) {
  count_needs(keeping);
  std::vector<Move> moves;
  const auto add = [&](Move move) {
    if (move.seconds <= 0 || refused_.contains(name(move))) return;
    move.seconds = misjudged(move.seconds);
    moves.push_back(move);
  };
  for (int32_t op = 0; op < index_.num_ops(); ++op) {
    if (timeline_.replayed_at[op] < 0) continue;
    Move move;
    move.until = timeline_.replayed_at[op];
    bool can_keep = true;
    int num_outputs = 0;
    for (int32_t value : index_.writes[op]) {
      if (keeping[value] != kForget || needs_[value] == 0) continue;
      ++num_outputs;
      can_keep = can_keep && index_.trace.values[value].can_keep;
      move.value = value;
      move.bytes += index_.trace.values[value].bytes;
    }
    if (!can_keep || num_outputs == 0) continue;
    const int64_t bytes = move.bytes;
    add_what_only_it_needs(keeping, move);
    add(move);
    if (num_outputs > 1) continue;
    for (const KeptForm& form : index_.trace.values[move.value].forms) {
      Move in_form = move;
      in_form.way = static_cast<int8_t>(&form - index_.trace.values[move.value].forms.data() + 1);
      in_form.bytes += form.bytes - bytes;
      in_form.seconds -= form.seconds;
      add(in_form);
    }
  }
  const std::vector<int32_t> first_need = first_needs();
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (keeping[value] <= 0 || needs_[value] == 0 || first_need[value] >= index_.num_uses()) continue;
    const TraceValue& kept = index_.trace.values[value];
    const KeptForm& form = kept.forms[keeping[value] - 1];
    add({value, 0, false, first_need[value], form.seconds, kept.bytes - form.bytes});
  }
  return moves;
}

// Ops that are replayed for this one alone are not replayed any more, and what is kept for it alone is not kept.
void Polish::add_what_only_it_needs(const Keeping& keeping, Move& move) {
  chain_.assign(1, index_.writer[move.value]);
  for (size_t at = 0; at < chain_.size() && at < kMaxChain; ++at) {
    move.seconds += index_.trace.ops[chain_[at]].seconds;
    for (int32_t value : index_.reads[chain_[at]]) {
      if (needs_[value] > 1) continue;
      if (keeping[value] != kForget) {
        move.bytes -= index_.kept_bytes(value, keeping[value]);
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

// Whether it fits where it was not kept before, before its use; then it is among the peaks.
bool Polish::reserve(int64_t budget_bytes, const Move& move) {
  const size_t last = static_cast<size_t>(move.until);  // peaks begin with the end of forward, not with a use
  if (peaks_up_to_[last] + move.bytes > budget_bytes) return false;
  for (size_t at = 0; at <= last; ++at) peaks_up_to_[at] += move.bytes;
  for (size_t at = last + 1; at < peaks_up_to_.size() && peaks_up_to_[at] < peaks_up_to_[last]; ++at) {
    peaks_up_to_[at] = peaks_up_to_[last];
  }
  return true;
}

Outcome Polish::evict(int64_t budget_bytes, Keeping& keeping) {
  Outcome outcome;
  for (int round = 0; round < kMaxRounds; ++round) {
    outcome = simulator_.run(keeping, &timeline_);
    if (outcome.peak_bytes <= budget_bytes) break;
    const auto& peaks = timeline_.peak_bytes;
    const auto peak_at = static_cast<int32_t>(std::max_element(peaks.begin(), peaks.end()) - peaks.begin());
    std::vector<Move> moves = moves_to_forget(keeping, peak_at - 1);
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
      if (is_touched[op]) continue;  // the same value, kept otherwise
      is_touched[op] = 1;
      apply(move, keeping);
      excess -= move.bytes;
    }
  }
  return outcome;
}

// Of what is there during that use and not needed until after it.
std::vector<Polish::Move> Polish::moves_to_forget(const Keeping& keeping, int32_t peak_at) {
  count_needs(keeping);
  const std::vector<int32_t> first_need = first_needs();
  std::vector<Move> moves;
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (index_.is_external(value) || keeping[value] == kForget || needs_[value] == 0) continue;
    if (first_need[value] <= peak_at) continue;
    const std::vector<KeptForm>& forms = index_.trace.values[value].forms;
    const int64_t bytes = index_.kept_bytes(value, keeping[value]);
    const double seconds = keeping[value] == 0 ? 0 : forms[keeping[value] - 1].seconds;
    for (size_t form = 0; form < forms.size(); ++form) {
      Move in_form{value, static_cast<int8_t>(form + 1), false, 0, forms[form].seconds - seconds, 0};
      in_form.bytes = bytes - forms[form].bytes;
      if (in_form.bytes > 0) moves.push_back(in_form);
    }
    if (!index_.can_be_replayed[value]) continue;
    Move replayed{value, kForget, false, 0, -seconds, bytes};
    if (add_what_it_would_need(keeping, replayed)) moves.push_back(replayed);
    const int32_t op = index_.writer[value];
    Move exchanged{value, kForget, true, 0, index_.trace.ops[op].seconds - seconds, bytes};
    bool can_exchange = false;
    for (int32_t read : index_.reads[op]) {
      if (needs_[read] > 0) continue;
      can_exchange = index_.trace.values[read].can_keep;
      if (!can_exchange) break;
      exchanged.bytes -= index_.trace.values[read].bytes;
    }
    if (can_exchange && exchanged.bytes > 0) moves.push_back(exchanged);
  }
  for (Move& move : moves) move.seconds = misjudged(move.seconds);
  return moves;
}

// The ops to be replayed for it that are not replayed now.
bool Polish::add_what_it_would_need(const Keeping& keeping, Move& move) {
  chain_.assign(1, index_.writer[move.value]);
  for (size_t at = 0; at < chain_.size(); ++at) {
    if (at == kMaxChain) return false;
    if (timeline_.replayed_at[chain_[at]] < 0) move.seconds += index_.trace.ops[chain_[at]].seconds;
    for (int32_t value : index_.reads[chain_[at]]) {
      if (needs_[value] > 0) continue;
      if (keeping[value] != kForget) {
        move.bytes -= index_.kept_bytes(value, keeping[value]);
      } else if (!index_.can_be_replayed[value]) {
        return false;
      } else if (std::find(chain_.begin(), chain_.end(), index_.writer[value]) == chain_.end()) {
        chain_.push_back(index_.writer[value]);
      }
    }
  }
  return move.bytes > 0;
}

}  // namespace drivetrain::budget
