// Finds policies by minimum cuts and by dynamic programming over segments, and returns the one with the best simulated
// outcome.
#include "budget/solver/solver.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "budget/solver/min_cut.h"
#include "budget/solver/segments.h"
#include "budget/solver/simulator.h"
#include "budget/solver/trace_index.h"

namespace drivetrain::budget {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Simulates policies and remembers the best one.
class Search {
 public:
  Search(const TraceIndex& index, int64_t budget) : simulator_(index), budget_(budget) {}

  // Returns its peak.
  int64_t try_policy(const Policy& policy) {
    const Outcome outcome = simulator_.run(policy);
    const auto peak_bytes = static_cast<double>(outcome.peak_bytes);
    const bool fits = outcome.peak_bytes <= budget_;
    const Rank rank = fits ? Rank(false, outcome.seconds, peak_bytes) : Rank(true, peak_bytes, outcome.seconds);
    smallest_ = std::min(smallest_, outcome.peak_bytes);
    if (rank < best_rank_) {
      best_rank_ = rank;
      best_ = policy;
      best_outcome_ = outcome;
    }
    return outcome.peak_bytes;
  }

  int64_t budget() const { return budget_; }
  Solution solution(double bound_seconds) const {
    return {best_, best_outcome_, bound_seconds, best_outcome_.peak_bytes <= budget_, smallest_};
  }

 private:
  using Rank = std::tuple<bool, double, double>;  // a policy that fits is better, then fewer seconds or bytes are

  Simulator simulator_;
  const int64_t budget_;
  Rank best_rank_{true, kInfinite, kInfinite};
  Policy best_;
  Outcome best_outcome_;
  int64_t smallest_ = std::numeric_limits<int64_t>::max();
};

// Tries policies of minimum cuts, which ignore the memory of replays, and returns a lower bound on the seconds.
double try_min_cuts(const TraceIndex& index, Search& search) {
  constexpr int kMaxPrices = 40;
  constexpr double kExact = 1 - 1e-9;  // allows for rounding
  const auto budget = static_cast<double>(search.budget());
  MinCut cut(index);
  double bound = 0;
  const auto try_price = [&](double price) {
    PricedPolicy found = cut.at(price);
    bound = std::max(bound, found.bound * kExact - price * budget);
    const int64_t peak_bytes = search.try_policy(found.policy);
    return std::pair(std::move(found), peak_bytes);
  };
  double highest_price = 1;
  for (const TraceOp& op : index.trace.ops) highest_price += op.seconds;
  const PricedPolicy most = try_price(0).first, least = try_price(highest_price).first;
  // Bisects to the price of a byte at which the peak fits. Peaks are not monotonic in the price, so it may miss one.
  // Then bisects to the price at which the bytes after forward fit, where the bound is the highest.
  for (const bool by_peak : {true, false}) {
    PricedPolicy high = most, low = least;
    for (int i = 0; i < kMaxPrices && high.bytes > low.bytes; ++i) {
      auto [now, peak_bytes] = try_price(price_between(high, low));
      if (now.bytes >= high.bytes || now.bytes <= low.bytes) break;
      ((by_peak ? peak_bytes <= search.budget() : now.bytes <= budget) ? low : high) = std::move(now);
    }
  }
  return bound;
}

// Tries the best policies of the segments, and bisects to the smallest budget that has one. Where a simulated peak
// differs from the segments' own, asks for a budget that much smaller or larger.
void try_segments(const TraceIndex& index, Search& search) {
  const Segments segments(index);
  const auto try_best = [&](int64_t budget) -> std::optional<int64_t> {
    const std::optional<Policy> policy = segments.best(budget);
    if (!policy) return std::nullopt;
    return search.try_policy(*policy);
  };
  constexpr int64_t kCloseEnough = 500;  // times a difference
  int64_t low = 0, high = 1;
  for (const TraceValue& value : index.trace.values) high += 2 * value.bytes;
  while (high - low > 1 + high / kCloseEnough) {
    const int64_t middle = low + (high - low) / 2;
    (try_best(middle) ? high : low) = middle;
  }
  constexpr int kMaxTries = 4;
  int64_t asked = search.budget();
  for (int i = 0; i < kMaxTries && asked > 0; ++i) {
    const std::optional<int64_t> peak_bytes = try_best(asked);
    if (!peak_bytes) break;
    const int64_t over = *peak_bytes - search.budget();
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
  try_segments(index, search);
  return search.solution(bound_seconds);
}

}  // namespace drivetrain::budget
