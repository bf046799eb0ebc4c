// Tries keepings of several kinds, carries each out in the simulator, and keeps the best.
#include "activation/solver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "activation/keeping_cut.h"
#include "activation/polish.h"
#include "activation/segments.h"
#include "activation/simulator.h"
#include "activation/trace_index.h"
#include "base/check.h"

namespace drivetrain::activation {
namespace {

// The best that was tried, within the budget and of all.
class Search {
 public:
  Search(const TraceIndex& index, int64_t budget) : simulator_(index), budget_(budget) {}

  Outcome try_keeping(const Keeping& keeping) {
    const Outcome outcome = simulator_.run(keeping);
    smallest_ = std::min(smallest_, outcome.peak_bytes);
    const bool fits = outcome.peak_bytes <= budget_;
    const bool is_better =
        fits != is_feasible_ ? fits
        : fits ? std::pair(outcome.seconds, outcome.peak_bytes) < std::pair(best_outcome_.seconds, best_outcome_.peak_bytes)
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

// Seconds and bytes kept against each other, without regard to what replaying takes.
class PricedSearch {
 public:
  PricedSearch(const TraceIndex& index, Search& search) : cut_(index), search_(search) {
    for (const TraceOp& op : index.trace.ops) highest_price_ += op.seconds;
    most_ = cut_.at(0);
    search_.try_keeping(most_.keeping);
    least_ = cut_.at(highest_price_);
    search_.try_keeping(least_.keeping);
  }

  // Goes to the price at which two keepings cost the same, one that is too big after forward and one that is not,
  // until there is none between them.
  double bound() {
    const auto budget = static_cast<double>(search_.budget());
    if (most_.bytes <= budget) return most_.seconds;
    PricedKeeping high = most_, low = least_;
    double bound = 0;
    for (int i = 0; i < kMaxPrices && high.bytes > low.bytes; ++i) {
      const double price = std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes));
      PricedKeeping now = cut_.at(price);
      search_.try_keeping(now.keeping);
      bound = std::max(bound, now.bound - price * budget);
      if (now.seconds + price * now.bytes >= (high.seconds + price * high.bytes) * (1 - kRounding)) break;
      (now.bytes > budget ? high : low) = std::move(now);
    }
    return bound * (1 - kRounding);
  }

  // The two keepings of neighbouring prices of which one fits, also at the peak.
  std::vector<Keeping> around_budget() {
    PricedKeeping high = most_, low = least_;
    const bool least_fits = search_.try_keeping(low.keeping).peak_bytes <= search_.budget();
    for (int i = 0; least_fits && i < kMaxPrices && high.bytes > low.bytes; ++i) {
      const double price = std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes));
      PricedKeeping now = cut_.at(price);
      const bool fits = search_.try_keeping(now.keeping).peak_bytes <= search_.budget();
      if (now.bytes >= high.bytes || now.bytes <= low.bytes) break;
      (fits ? low : high) = std::move(now);
    }
    return {std::move(high.keeping), std::move(low.keeping)};
  }

 private:
  static constexpr int kMaxPrices = 40;
  static constexpr double kRounding = 1e-9;

  KeepingCut cut_;
  Search& search_;
  double highest_price_ = 1;
  PricedKeeping most_, least_;
};

// Where the simulator sees more or less than the segments said, so much less or more is asked of them.
std::vector<Keeping> in_segments(const Segments& segments, Search& search) {
  std::vector<Keeping> found;
  int64_t asked = search.budget();
  constexpr int kMaxTries = 4;
  for (int i = 0; i < kMaxTries && asked > 0; ++i) {
    std::optional<Keeping> keeping = segments.best(asked);
    if (!keeping) break;
    const int64_t over = search.try_keeping(*keeping).peak_bytes - search.budget();
    found.push_back(std::move(*keeping));
    if (over == 0) break;
    asked -= over;
  }
  return found;
}

// Makes each fit, and fills what room is left.
void polish(const TraceIndex& index, Search& search, std::vector<Keeping> keepings) {
  Polish polish(index, search.simulator());
  const int64_t budget = search.budget();
  for (Keeping& keeping : keepings) {
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
  for (double share : {0.99, 0.97, 0.95, 0.9, 0.8}) {
    Keeping keeping = search.best();
    polish.evict(static_cast<int64_t>(static_cast<double>(budget) * share), keeping);
    if (search.try_keeping(keeping).peak_bytes > budget) continue;
    polish.fill(budget, keeping);
    search.try_keeping(keeping);
  }
}

}  // namespace

Solution solve(const Trace& trace, int64_t budget_bytes) {
  if (budget_bytes <= 0) throw UserError(text("budget_bytes is ", budget_bytes, ": expected more than 0"));
  const TraceIndex index(trace);
  Search search(index, budget_bytes);
  PricedSearch priced(index, search);
  const double bound = priced.bound();
  std::vector<Keeping> keepings = priced.around_budget();
  const Segments segments(index);
  search.try_keeping(segments.smallest());
  for (Keeping& keeping : in_segments(segments, search)) keepings.push_back(std::move(keeping));
  polish(index, search, std::move(keepings));
  Solution solution = search.solution();
  solution.bound_seconds = bound;
  return solution;
}

}  // namespace drivetrain::activation
