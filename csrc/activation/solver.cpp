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

// Prices at which two keepings cost the same, between one that is too big and one that fits, until nothing is between.
double bound_of(KeepingCut& cut, Search& search, PricedKeeping high, PricedKeeping low) {
  const auto budget = static_cast<double>(search.budget());
  if (high.bytes <= budget) return high.seconds;
  double bound = 0;
  for (int i = 0; i < 40 && high.bytes > low.bytes; ++i) {
    const double price = std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes));
    PricedKeeping now = cut.at(price);
    search.try_keeping(now.keeping);
    bound = std::max(bound, now.bound - price * budget);
    const double on_line = high.seconds + price * high.bytes;
    if (now.seconds + price * now.bytes >= on_line * (1 - 1e-9)) break;
    (now.bytes > budget ? high : low) = std::move(now);
  }
  return bound;
}

}  // namespace

Solution solve(const Trace& trace, int64_t budget_bytes) {
  if (budget_bytes <= 0) throw UserError(text("budget_bytes is ", budget_bytes, ": expected more than 0"));
  const TraceIndex index(trace);
  Search search(index, budget_bytes);
  KeepingCut cut(index);
  const PricedKeeping all = cut.at(0);
  search.try_keeping(all.keeping);
  double all_seconds = 0;
  for (const TraceOp& op : trace.ops) all_seconds += op.seconds;
  const PricedKeeping least = cut.at(all_seconds + 1);
  search.try_keeping(least.keeping);
  const double bound = bound_of(cut, search, all, least);
  // By how much is there at the peak.
  double low = 0, high = all_seconds + 1;
  for (int i = 0; i < 40 && high > low * (1 + 1e-6); ++i) {
    const double price = low == 0 ? high * 1e-3 : std::sqrt(low * high);
    const bool fits = search.try_keeping(cut.at(price).keeping).peak_bytes <= budget_bytes;
    (fits ? high : low) = price;
    if (!fits || low > 0 || high > 1e-30) continue;
    break;
  }
  const Segments segments(index);
  search.try_keeping(segments.smallest());
  // Where the simulator sees more or less than the segments said, so much less or more is asked of them.
  int64_t asked = budget_bytes;
  for (int i = 0; i < 4 && asked > 0; ++i) {
    const std::optional<Keeping> keeping = segments.best(asked);
    if (!keeping) break;
    const int64_t over = search.try_keeping(*keeping).peak_bytes - budget_bytes;
    if (over == 0) break;
    asked -= over;
  }
  if (search.is_feasible()) {
    Keeping filled = search.best();
    fill(index, search.simulator(), budget_bytes, filled);
    search.try_keeping(filled);
  }
  Solution solution = search.solution();
  solution.bound_seconds = bound;
  return solution;
}

}  // namespace drivetrain::activation
