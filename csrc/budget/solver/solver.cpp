// Tries keepings of several kinds, carries each out in the simulator, and keeps the best.
#include "budget/solver/solver.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "budget/solver/backward_bound.h"
#include "budget/solver/local_search.h"
#include "budget/solver/min_cut.h"
#include "budget/solver/segments.h"
#include "budget/solver/simulator.h"
#include "budget/solver/trace_index.h"

namespace drivetrain::budget {
namespace {

constexpr int32_t kFewOps = 640;          // so few that segments may begin anywhere
constexpr int64_t kPolishWork = 100'000;  // ops in all rounds
constexpr double kAlmostOne = 1 + 1e-6;
constexpr double kCloseEnough = 1.2;      // a plan, to the bound
constexpr int32_t kMaxOpsInBound = 2000;  // more would take seconds

// The best that was tried, within the budget and of all.
class Search {
 public:
  Search(const TraceIndex& index, int64_t budget) : simulator_(index), budget_(budget) {}

  Outcome try_keeping(const Keeping& keeping) {
    const Outcome outcome = simulator_.run(keeping);
    smallest_ = std::min(smallest_, outcome.peak_bytes);
    const bool fits = outcome.peak_bytes <= budget_;
    const bool is_better = fits != is_feasible_ ? fits
                           : fits               ? std::pair(outcome.seconds, outcome.peak_bytes) <
                                        std::pair(best_outcome_.seconds, best_outcome_.peak_bytes)
                                  : best_.empty() || std::pair(outcome.peak_bytes, outcome.seconds) <
                                                         std::pair(best_outcome_.peak_bytes, best_outcome_.seconds);
    if (is_better) {
      best_ = keeping;
      best_outcome_ = outcome;
      is_feasible_ = fits;
    }
    return outcome;
  }

  int64_t budget() const { return budget_; }
  const Keeping& best() const { return best_; }
  const Outcome& best_outcome() const { return best_outcome_; }
  bool is_feasible() const { return is_feasible_; }
  Solution solution() const { return {best_, best_outcome_, 0, is_feasible_, smallest_}; }
  Simulator& simulator() { return simulator_; }

 private:
  Simulator simulator_;
  const int64_t budget_;
  Keeping best_;
  Outcome best_outcome_;
  bool is_feasible_ = false;
  int64_t smallest_ = std::numeric_limits<int64_t>::max();
};

struct PricedBound {
  double seconds = 0;
  double price = 0;  // of a byte
};

// Seconds and bytes kept against each other, without regard to what replaying takes.
class PricedSearch {
 public:
  PricedSearch(const TraceIndex& index, Search& search) : cut_(index), search_(search) {
    for (const TraceOp& op : index.trace.ops) highest_price_ += op.seconds;
    most_ = try_price(0);
    least_ = try_price(highest_price_);
  }

  // Goes to the price at which two keepings cost the same, one that is too big after forward and one that is not,
  // until there is none between them.
  PricedBound bound() {
    const auto budget = static_cast<double>(search_.budget());
    if (most_.bytes <= budget) return {std::max(0.0, most_.bound * (1 - kRounding)), 0};
    PricedKeeping high = most_, low = least_;
    PricedBound bound;
    for (int i = 0; i < kMaxPrices && high.bytes > low.bytes; ++i) {
      const double price = std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes));
      PricedKeeping now = try_price(price);
      const double seconds = now.bound * (1 - kRounding) - price * budget;
      if (seconds > bound.seconds) bound = {seconds, price};
      if (now.seconds + price * now.bytes >= (high.seconds + price * high.bytes) * (1 - kRounding)) break;
      (now.bytes > budget ? high : low) = std::move(now);
    }
    return bound;
  }

  // Looks for the price at which the peak fits, too. Peaks jump, so that the search may go astray.
  void find_fitting() {
    PricedKeeping high = most_, low = least_;
    for (int i = 0; i < kMaxPrices && high.bytes > low.bytes; ++i) {
      PricedKeeping now = try_price(std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes)));
      if (now.bytes >= high.bytes || now.bytes <= low.bytes) break;
      (tried_.back().peak_bytes <= search_.budget() ? low : high) = std::move(now);
    }
  }

  // Of all that were tried those whose peaks are closest to the budget.
  std::vector<Keeping> closest() {
    const auto distance = [&](const Tried& tried) { return std::abs(tried.peak_bytes - search_.budget()); };
    std::stable_sort(tried_.begin(), tried_.end(),
                     [&](const Tried& a, const Tried& b) { return distance(a) < distance(b); });
    std::vector<Keeping> keepings;
    for (Tried& tried : tried_) {
      if (keepings.size() == kMaxClosest) break;
      if (std::find(keepings.begin(), keepings.end(), tried.keeping) != keepings.end()) continue;
      keepings.push_back(std::move(tried.keeping));
    }
    return keepings;
  }

 private:
  struct Tried {
    Keeping keeping;
    int64_t peak_bytes;
  };

  PricedKeeping try_price(double price) {
    PricedKeeping found = cut_.at(price);
    tried_.push_back({found.keeping, search_.try_keeping(found.keeping).peak_bytes});
    return found;
  }

  static constexpr int kMaxPrices = 40;
  static constexpr size_t kMaxClosest = 8;
  static constexpr double kRounding = 1e-9;

  KeepingCut cut_;
  Search& search_;
  double highest_price_ = 1;
  PricedKeeping most_, least_;
  std::vector<Tried> tried_;
};

// Where the simulator sees more or less than the segments said, so much less or more is asked of them.
std::vector<Keeping> in_segments(const Segments& segments, Search& search) {
  std::vector<Keeping> found;
  int64_t asked = search.budget();
  constexpr int kMaxTries = 4;
  constexpr int64_t kCloseEnough = 500;
  for (int i = 0; i < kMaxTries && asked > 0; ++i) {
    std::optional<Keeping> keeping = segments.best(asked);
    if (!keeping) break;
    const int64_t over = search.try_keeping(*keeping).peak_bytes - search.budget();
    found.push_back(std::move(*keeping));
    if (over <= 0 && over > -search.budget() / kCloseEnough) break;
    asked -= over;
  }
  return found;
}

// Makes each fit, and fills what room is left.
void polish(const TraceIndex& index, Search& search, std::vector<Keeping> keepings, double bound) {
  Polish polish(index, search.simulator());
  const int64_t budget = search.budget();
  const auto is_done = [&] { return search.is_feasible() && search.best_outcome().seconds <= bound * kAlmostOne; };
  for (Keeping& keeping : keepings) {
    if (is_done()) return;
    if (polish.evict(budget, keeping).peak_bytes > budget) continue;
    polish.fill(budget, keeping);
    search.try_keeping(keeping);
  }
  if (!search.is_feasible()) {
    Keeping keeping = search.best();
    if (polish.evict(budget, keeping).peak_bytes <= budget) polish.fill(budget, keeping);
    search.try_keeping(keeping);
  }
  if (!search.is_feasible()) return;
  // Away from what fits, and back another way.
  const size_t num_rounds = static_cast<size_t>(std::clamp<int64_t>(kPolishWork / (index.num_ops() + 1), 5, 200));
  for (size_t round = 0; round < num_rounds && !is_done(); ++round) {
    constexpr std::array<double, 5> kShares = {0.99, 0.97, 0.95, 0.9, 0.8};
    if (round == kShares.size()) polish.set_error(1);
    Keeping keeping = search.best();
    polish.evict(static_cast<int64_t>(static_cast<double>(budget) * kShares[round % kShares.size()]), keeping);
    if (search.try_keeping(keeping).peak_bytes > budget) continue;
    polish.fill(budget, keeping);
    search.try_keeping(keeping);
  }
}

// Where what was found is far from it: a better bound, or a proof that there is none much better.
double tightened(const TraceIndex& index, const Search& search, const PricedBound& bound) {
  const double enough = search.best_outcome().seconds / kCloseEnough;
  if (!search.is_feasible() || index.num_ops() > kMaxOpsInBound || bound.seconds >= enough) return bound.seconds;
  return std::max(bound.seconds, bound_in_backward(index, search.budget(), {enough, bound.price}));
}

// Whether or not they are asked for: what more memory could still be spared.
void find_smallest(const TraceIndex& index, Search& search, Keeping keeping, bool uses_local_search) {
  int64_t smallest = search.try_keeping(keeping).peak_bytes;
  if (!uses_local_search) return;
  Polish polish(index, search.simulator());
  constexpr int kMaxSteps = 50;
  for (int step = 0; step < kMaxSteps; ++step) {
    constexpr double kStep = 0.99;
    polish.evict(static_cast<int64_t>(static_cast<double>(smallest) * kStep), keeping);
    const int64_t now = search.try_keeping(keeping).peak_bytes;
    if (now >= smallest) return;
    smallest = now;
  }
}

// Keeps every value that can be kept.
Keeping everything_kept(const TraceIndex& index) {
  Keeping keeping(index.num_values(), kForget);
  for (int32_t value = 0; value < index.num_values(); ++value) {
    if (index.trace.values[value].can_keep) keeping[value] = 0;
  }
  return keeping;
}

}  // namespace

Solution solve(const Trace& trace, int64_t budget_bytes, const SolverParts& parts) {
  if (budget_bytes <= 0) throw UserError(text("budget_bytes is ", budget_bytes, ": expected more than 0"));
  const TraceIndex index(trace);
  Search search(index, budget_bytes);
  PricedBound bound;
  std::vector<Keeping> keepings;
  if (parts.min_cut) {
    PricedSearch priced(index, search);
    bound = priced.bound();
    priced.find_fitting();
    keepings = priced.closest();
  } else {
    keepings = {everything_kept(index)};
    search.try_keeping(keepings[0]);
  }
  for (Segments::Cuts cuts : {Segments::Cuts::kInValleys, Segments::Cuts::kEverywhere}) {
    if (!parts.segments) continue;
    if (cuts == Segments::Cuts::kEverywhere && (index.num_ops() > kFewOps || !parts.segments_anywhere)) continue;
    const Segments segments(index, cuts, parts.min_cut);
    find_smallest(index, search, segments.smallest(), parts.local_search);
    for (Keeping& keeping : in_segments(segments, search)) keepings.push_back(std::move(keeping));
  }
  if (parts.local_search) polish(index, search, std::move(keepings), bound.seconds);
  Solution solution = search.solution();
  solution.bound_seconds = parts.min_cut ? tightened(index, search, bound) : 0;
  return solution;
}

}  // namespace drivetrain::budget
