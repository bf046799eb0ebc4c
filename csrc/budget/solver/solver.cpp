// Finds policies by minimum cuts and by dynamic programming over segments, and returns the one with the best simulated
// outcome.
#include "budget/solver/solver.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "budget/solver/min_cut.h"
#include "budget/solver/segments.h"
#include "budget/solver/simulator.h"
#include "budget/solver/trace_index.h"

namespace drivetrain::budget {
namespace {

// Simulates policies and remembers the best one.
class Search {
 public:
  Search(const TraceIndex& index, int64_t budget) : simulator_(index), budget_(budget) {}

  Outcome try_policy(const Policy& policy) {
    const Outcome outcome = simulator_.run(policy);
    smallest_ = std::min(smallest_, outcome.peak_bytes);
    const bool fits = outcome.peak_bytes <= budget_;
    const bool is_better = fits != is_feasible_ ? fits
                           : fits               ? std::pair(outcome.seconds, outcome.peak_bytes) <
                                        std::pair(best_outcome_.seconds, best_outcome_.peak_bytes)
                                  : best_.empty() || std::pair(outcome.peak_bytes, outcome.seconds) <
                                                         std::pair(best_outcome_.peak_bytes, best_outcome_.seconds);
    if (is_better) {
      best_ = policy;
      best_outcome_ = outcome;
      is_feasible_ = fits;
    }
    return outcome;
  }

  int64_t budget() const { return budget_; }
  Solution solution(double bound_seconds) const {
    return {best_, best_outcome_, bound_seconds, is_feasible_, smallest_};
  }

 private:
  Simulator simulator_;
  const int64_t budget_;
  Policy best_;
  Outcome best_outcome_;
  bool is_feasible_ = false;
  int64_t smallest_ = std::numeric_limits<int64_t>::max();
};

// Tries policies of minimum cuts, which ignore the memory of replays, and returns a lower bound on the seconds.
double try_min_cuts(const TraceIndex& index, Search& search) {
  struct Tried {
    PricedPolicy priced;
    int64_t peak_bytes;
  };
  constexpr int kMaxPrices = 40;
  constexpr double kExact = 1 - 1e-9;  // allows for rounding
  MinCut cut(index);
  const auto try_price = [&](double price) {
    PricedPolicy found = cut.at(price);
    const int64_t peak_bytes = search.try_policy(found.policy).peak_bytes;
    return Tried{std::move(found), peak_bytes};
  };
  const auto price_between = [](const PricedPolicy& high, const PricedPolicy& low) {
    return std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes));
  };
  double highest_price = 1;
  for (const TraceOp& op : index.trace.ops) highest_price += op.seconds;
  const PricedPolicy most = try_price(0).priced, least = try_price(highest_price).priced;
  // Bisects to the price of a byte at which the peak fits. Peaks are not monotonic in the price, so it may miss one.
  PricedPolicy high = most, low = least;
  for (int i = 0; i < kMaxPrices && high.bytes > low.bytes; ++i) {
    Tried now = try_price(price_between(high, low));
    if (now.priced.bytes >= high.bytes || now.priced.bytes <= low.bytes) break;
    (now.peak_bytes <= search.budget() ? low : high) = std::move(now.priced);
  }
  // Bisects to the price at which two policies cost the same: one exceeds the budget after forward, and one does not.
  high = most, low = least;
  const auto budget = static_cast<double>(search.budget());
  double bound = most.bytes <= budget ? std::max(0.0, most.bound * kExact) : 0;
  for (int i = 0; i < kMaxPrices && most.bytes > budget && high.bytes > low.bytes; ++i) {
    const double price = price_between(high, low);
    PricedPolicy now = try_price(price).priced;
    bound = std::max(bound, now.bound * kExact - price * budget);
    if (now.seconds + price * now.bytes >= (high.seconds + price * high.bytes) * kExact) break;
    (now.bytes > budget ? high : low) = std::move(now);
  }
  return bound;
}

// Tries the best policies of the segments. Where a simulated peak differs from the segments' own, asks for a budget
// that much smaller or larger.
void try_segments(const Segments& segments, Search& search) {
  search.try_policy(segments.smallest());
  int64_t asked = search.budget();
  constexpr int kMaxTries = 4;
  constexpr int64_t kCloseEnough = 500;
  for (int i = 0; i < kMaxTries && asked > 0; ++i) {
    const std::optional<Policy> policy = segments.best(asked);
    if (!policy) break;
    const int64_t over = search.try_policy(*policy).peak_bytes - search.budget();
    if (over <= 0 && over > -search.budget() / kCloseEnough) break;
    asked -= over;
  }
}

}  // namespace

Solution solve(const Trace& trace, int64_t budget_bytes) {
  if (budget_bytes <= 0) throw UserError(text("budget_bytes is ", budget_bytes, ": expected more than 0"));
  const TraceIndex index(trace);
  Search search(index, budget_bytes);
  const double bound_seconds = try_min_cuts(index, search);
  try_segments(Segments(index), search);
  return search.solution(bound_seconds);
}

}  // namespace drivetrain::budget
