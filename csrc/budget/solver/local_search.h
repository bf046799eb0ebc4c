// Declares the local search, which improves a policy: it saves values that fit the budget, and drops values that do
// not.
#pragma once

#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "budget/solver/simulator.h"
#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

class LocalSearch {
 public:
  // Both must outlive this object.
  LocalSearch(const TraceIndex& index, Simulator& simulator);

  // Saves outputs of replayed operations while they fit, those that spare the most seconds per byte first. The policy
  // must fit the budget, and does so afterwards. Returns its outcome.
  Outcome fill(int64_t budget_bytes, Policy& policy);

  // Drops values that are in memory at the peak and needed only later, those that cost the fewest seconds per byte
  // first. Stops when the policy fits or nothing is left to drop. Returns its outcome.
  Outcome evict(int64_t budget_bytes, Policy& policy);

  // Multiplies the estimated seconds of later moves by random factors from 1 / (1 + error) to 1 + error, so that
  // repeated searches differ.
  void set_error(double error) { error_ = error; }

 private:
  // Another entry for a value, and the estimated effect.
  struct Move {
    int32_t value = -1;
    int8_t entry = kSave;      // kSave also saves the operation's other recomputed outputs
    bool saves_reads = false;  // of the value's operation, where nothing needs them now
    int32_t until = 0;         // the use from which the value is in memory anyway
    double seconds = 0;        // spared by fill(), added by evict()
    int64_t bytes = 0;         // added by fill(), spared by evict()
  };

  bool fill_once(int64_t budget_bytes, Policy& policy, Outcome& outcome);
  std::vector<Move> moves_to_save(const Policy& policy);
  std::vector<Move> moves_to_drop(const Policy& policy, int32_t peak_at);
  void add_what_only_it_needs(const Policy& policy, Move& move);
  bool add_what_it_would_need(const Policy& policy, Move& move);
  std::vector<int32_t> first_needs() const;
  double with_error(double seconds);
  void count_needs(const Policy& policy);
  bool reserve(int64_t budget_bytes, const Move& move);
  void apply(const Move& move, Policy& policy) const;
  static std::pair<int32_t, int8_t> name(const Move& move) { return {move.value, move.entry}; }

  const TraceIndex& index_;
  Simulator& simulator_;
  std::vector<int32_t> first_take_;  // per value: the use that takes it first
  Timeline timeline_;
  std::vector<int64_t> peaks_up_to_;              // after forward, and up to each use
  std::vector<int32_t> needs_;                    // per value: releases, and operations to be replayed that read it
  std::vector<int32_t> chain_;                    // operations
  std::set<std::pair<int32_t, int8_t>> refused_;  // moves that did not fit
  double error_ = 0;
  std::minstd_rand random_;  // with a fixed seed
};

}  // namespace drivetrain::budget
