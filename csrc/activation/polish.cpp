// Finds room in the timeline of a step, and checks with the simulator.
#include "activation/polish.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace drivetrain::activation {
namespace {

// All forgotten outputs of an op are kept, so that it is not replayed.
struct Move {
  int32_t op;
  int64_t bytes;   // more, from the end of forward until the op was replayed
  double seconds;  // less
};

bool is_first(const Move& a, const Move& b) {
  // Most seconds per byte; what needs no bytes before everything.
  const double left = a.seconds * static_cast<double>(std::max<int64_t>(b.bytes, 0));
  const double right = b.seconds * static_cast<double>(std::max<int64_t>(a.bytes, 0));
  return std::pair(-left, a.op) < std::pair(-right, b.op);
}

class Filler {
 public:
  Filler(const TraceIndex& index, Simulator& simulator, int64_t budget) : index_(index), simulator_(simulator), budget_(budget) {}

  bool improve(Keeping& keeping, Outcome& outcome) {
    simulator_.run(keeping, &timeline_);
    std::vector<Move> moves = possible_moves(keeping);
    std::sort(moves.begin(), moves.end(), is_first);
    std::vector<Move> fitting;
    for (const Move& move : moves) {
      if (reserve(move)) fitting.push_back(move);
    }
    // What the estimate has wrong shows now; the first half may be right.
    while (!fitting.empty()) {
      Keeping next = keeping;
      for (const Move& move : fitting) keep_outputs(move.op, next);
      const Outcome found = simulator_.run(next);
      if (found.peak_bytes <= budget_ && found.seconds < outcome.seconds) {
        keeping = std::move(next);
        outcome = found;
        return true;
      }
      if (fitting.size() == 1) refused_[fitting[0].op] = 1;
      fitting.resize(fitting.size() / 2);
    }
    return false;
  }

  void start() { refused_.assign(index_.num_ops(), 0); }

 private:
  std::vector<Move> possible_moves(const Keeping& keeping) {
    count_needs(keeping);
    std::vector<Move> moves;
    for (int32_t op = 0; op < index_.num_ops(); ++op) {
      if (timeline_.replayed_at[op] < 0 || refused_[op]) continue;
      Move move{op, 0, 0};
      bool can_keep = true;
      for (int32_t value : index_.writes[op]) {
        if (keeping[value] != kForget || !simulator_.was_needed(value)) continue;
        can_keep = can_keep && index_.trace.values[value].can_keep;
        move.bytes += index_.trace.values[value].bytes;
      }
      if (!can_keep) continue;
      add_what_only_it_needs(keeping, move);
      moves.push_back(move);
    }
    return moves;
  }

  void count_needs(const Keeping& keeping) {
    needs_ = index_.num_tickets;
    for (int32_t op = index_.num_ops() - 1; op >= 0; --op) {
      bool is_to_be_replayed = false;
      for (int32_t value : index_.writes[op]) is_to_be_replayed |= needs_[value] > 0 && keeping[value] == kForget;
      if (!is_to_be_replayed) continue;
      for (int32_t value : index_.reads[op]) ++needs_[value];
    }
  }

  // Ops that are replayed for this one alone are not replayed any more, and what is kept for it alone is not kept.
  void add_what_only_it_needs(const Keeping& keeping, Move& move) {
    std::vector<int32_t> ops = {move.op};
    for (size_t at = 0; at < ops.size() && at < kMaxChain; ++at) {
      move.seconds += index_.trace.ops[ops[at]].seconds;
      for (int32_t value : index_.reads[ops[at]]) {
        if (needs_[value] > 1) continue;
        if (keeping[value] != kForget) {
          move.bytes -= index_.kept_bytes(value, keeping[value]);
        } else if (std::find(ops.begin(), ops.end(), index_.writer[value]) == ops.end()) {
          const auto outputs = index_.writes[index_.writer[value]];
          const auto is_for_others = [&](int32_t output) { return output != value && needs_[output] > 0; };
          if (std::none_of(outputs.begin(), outputs.end(), is_for_others)) ops.push_back(index_.writer[value]);
        }
      }
    }
  }

  bool reserve(const Move& move) {
    const auto begin = timeline_.peak_bytes.begin();
    const auto end = begin + timeline_.replayed_at[move.op] + 1;  // the peak of use i is at i + 1
    if (*std::max_element(begin, end) + move.bytes > budget_) return false;
    for (auto bytes = begin; bytes != end; ++bytes) *bytes += move.bytes;
    return true;
  }

  void keep_outputs(int32_t op, Keeping& keeping) const {
    for (int32_t value : index_.writes[op]) {
      if (index_.trace.values[value].can_keep && keeping[value] == kForget) keeping[value] = 0;
    }
  }

  static constexpr size_t kMaxChain = 64;

  const TraceIndex& index_;
  Simulator& simulator_;
  const int64_t budget_;
  Timeline timeline_;
  std::vector<int32_t> needs_;
  std::vector<uint8_t> refused_;
};

}  // namespace

Outcome fill(const TraceIndex& index, Simulator& simulator, int64_t budget_bytes, Keeping& keeping) {
  Outcome outcome = simulator.run(keeping);
  Filler filler(index, simulator, budget_bytes);
  filler.start();
  constexpr int kMaxRounds = 100;
  for (int round = 0; round < kMaxRounds; ++round) {
    if (!filler.improve(keeping, outcome)) break;
  }
  return outcome;
}

}  // namespace drivetrain::activation
