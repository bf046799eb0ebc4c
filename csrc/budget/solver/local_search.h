// Local improvement of a keeping: what is replayed although it would fit is kept, and what does not fit is forgotten.
#pragma once

#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "budget/solver/simulator.h"
#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

class Polish {
 public:
  // Both must outlive it.
  Polish(const TraceIndex& index, Simulator& simulator);

  // Keeps outputs of replayed ops where there is room until they would be replayed, those first that save most seconds
  // per byte. The keeping must fit into the budget, and does so afterwards. Returns its outcome.
  Outcome fill(int64_t budget_bytes, Keeping& keeping);

  // Forgets values that are there at the peak and not needed until later, those first that cost least seconds per byte,
  // until the keeping fits; perhaps it does not get there. Returns the outcome.
  Outcome evict(int64_t budget_bytes, Keeping& keeping);

  // From now on both misjudge seconds by up to this factor, differently every time: to get somewhere else.
  void set_error(double error) { error_ = error; }

 private:
  // Another way of keeping a value, and what that would change.
  struct Move {
    int32_t value = -1;
    int8_t way = 0;            // as it is: so are the other forgotten outputs of its op
    bool keeps_reads = false;  // where they are not needed now
    int32_t until = 0;         // the use from which on it is there anyway
    double seconds = 0;        // less with fill, more with evict
    int64_t bytes = 0;         // more with fill, less with evict
  };

  bool fill_once(int64_t budget_bytes, Keeping& keeping, Outcome& outcome);
  std::vector<Move> moves_to_keep(const Keeping& keeping);
  std::vector<Move> moves_to_forget(const Keeping& keeping, int32_t peak_at);
  void add_what_only_it_needs(const Keeping& keeping, Move& move);
  bool add_what_it_would_need(const Keeping& keeping, Move& move);
  std::vector<int32_t> first_needs() const;
  double misjudged(double seconds);
  void count_needs(const Keeping& keeping);
  bool reserve(int64_t budget_bytes, const Move& move);
  void apply(const Move& move, Keeping& keeping) const;
  static std::pair<int32_t, int8_t> name(const Move& move) { return {move.value, move.way}; }

  const TraceIndex& index_;
  Simulator& simulator_;
  std::vector<int32_t> first_take_;  // per value: the use that takes it first
  Timeline timeline_;
  std::vector<int64_t> peaks_up_to_;              // the end of forward, and each use: the most until then
  std::vector<int32_t> needs_;                    // per value: tickets, and ops to be replayed that read it
  std::vector<int32_t> chain_;                    // ops
  std::set<std::pair<int32_t, int8_t>> refused_;  // moves that did not fit
  double error_ = 0;
  std::minstd_rand random_;  // always the same
};

}  // namespace drivetrain::budget
