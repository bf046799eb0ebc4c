// Finds policies by minimum cuts and by dynamic programming over segments, improves them by local search, and returns
// the one with the best simulated outcome.
#include "budget/solver/solver.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "budget/solver/local_search.h"
#include "budget/solver/min_cut.h"
#include "budget/solver/segments.h"
#include "budget/solver/simulator.h"
#include "budget/solver/trace_index.h"

namespace drivetrain::budget {
namespace {

constexpr int64_t kRoundsWork = 100'000;  // operations in all rounds of the local search
constexpr double kAlmostOne = 1 + 1e-6;

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
  bool is_feasible() const { return is_feasible_; }
  const Policy& best() const { return best_; }
  double best_seconds() const { return best_outcome_.seconds; }
  Simulator& simulator() { return simulator_; }
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

// Searches the price of a saved byte by minimum cuts, which ignore the memory of replays.
class PricedSearch {
 public:
  PricedSearch(const TraceIndex& index, Search& search) : cut_(index), search_(search) {
    double highest_price = 1;
    for (const TraceOp& op : index.trace.ops) highest_price += op.seconds;
    most_ = try_price(0);
    least_ = try_price(highest_price);
  }

  // Returns a lower bound on the seconds. Bisects to the price at which two policies cost the same: one exceeds the
  // budget after forward, and one does not.
  double bound() {
    const auto budget = static_cast<double>(search_.budget());
    if (most_.bytes <= budget) return std::max(0.0, most_.bound * kExact);
    PricedPolicy high = most_, low = least_;
    double bound = 0;
    for (int i = 0; i < kMaxPrices && high.bytes > low.bytes; ++i) {
      const double price = price_between(high, low);
      PricedPolicy now = try_price(price);
      bound = std::max(bound, now.bound * kExact - price * budget);
      if (now.seconds + price * now.bytes >= (high.seconds + price * high.bytes) * kExact) break;
      (now.bytes > budget ? high : low) = std::move(now);
    }
    return bound;
  }

  // Bisects to the price at which the peak fits. Peaks are not monotonic in the price, so the search may miss it.
  void find_fitting() {
    PricedPolicy high = most_, low = least_;
    for (int i = 0; i < kMaxPrices && high.bytes > low.bytes; ++i) {
      PricedPolicy now = try_price(price_between(high, low));
      if (now.bytes >= high.bytes || now.bytes <= low.bytes) break;
      (tried_.back().peak_bytes <= search_.budget() ? low : high) = std::move(now);
    }
  }

  // Returns the tried policies whose peaks are closest to the budget.
  std::vector<Policy> closest() {
    const auto distance = [&](const Tried& tried) { return std::abs(tried.peak_bytes - search_.budget()); };
    std::stable_sort(tried_.begin(), tried_.end(),
                     [&](const Tried& a, const Tried& b) { return distance(a) < distance(b); });
    std::vector<Policy> policies;
    for (Tried& tried : tried_) {
      if (policies.size() == kMaxClosest) break;
      if (std::find(policies.begin(), policies.end(), tried.policy) != policies.end()) continue;
      policies.push_back(std::move(tried.policy));
    }
    return policies;
  }

 private:
  struct Tried {
    Policy policy;
    int64_t peak_bytes;
  };

  PricedPolicy try_price(double price) {
    PricedPolicy found = cut_.at(price);
    tried_.push_back({found.policy, search_.try_policy(found.policy).peak_bytes});
    return found;
  }

  static double price_between(const PricedPolicy& high, const PricedPolicy& low) {
    return std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes));
  }

  static constexpr int kMaxPrices = 40;
  static constexpr size_t kMaxClosest = 8;
  static constexpr double kExact = 1 - 1e-9;  // allows for rounding

  MinCut cut_;
  Search& search_;
  PricedPolicy most_, least_;  // the ones that save the most and the least bytes
  std::vector<Tried> tried_;
};

// Returns the best policies of the segments. Where a simulated peak differs from the segments' own, asks for a budget
// that much smaller or larger.
std::vector<Policy> in_segments(const Segments& segments, Search& search) {
  std::vector<Policy> found;
  int64_t asked = search.budget();
  constexpr int kMaxTries = 4;
  constexpr int64_t kCloseEnough = 500;
  for (int i = 0; i < kMaxTries && asked > 0; ++i) {
    std::optional<Policy> policy = segments.best(asked);
    if (!policy) break;
    const int64_t over = search.try_policy(*policy).peak_bytes - search.budget();
    found.push_back(std::move(*policy));
    if (over <= 0 && over > -search.budget() / kCloseEnough) break;
    asked -= over;
  }
  return found;
}

// Makes each policy fit, and fills the memory that is left. Then drops values from the best policy and fills it again,
// in rounds, until it reaches the bound.
void improve(const TraceIndex& index, Search& search, std::vector<Policy> policies, double bound_seconds) {
  LocalSearch local(index, search.simulator());
  const int64_t budget = search.budget();
  const auto is_done = [&] { return search.is_feasible() && search.best_seconds() <= bound_seconds * kAlmostOne; };
  for (Policy& policy : policies) {
    if (is_done()) return;
    if (local.evict(budget, policy).peak_bytes > budget) continue;
    local.fill(budget, policy);
    search.try_policy(policy);
  }
  if (!search.is_feasible()) {
    Policy policy = search.best();
    if (local.evict(budget, policy).peak_bytes <= budget) local.fill(budget, policy);
    search.try_policy(policy);
  }
  if (!search.is_feasible()) return;
  const size_t num_rounds = static_cast<size_t>(std::clamp<int64_t>(kRoundsWork / (index.num_ops() + 1), 5, 200));
  for (size_t round = 0; round < num_rounds && !is_done(); ++round) {
    constexpr std::array<double, 5> kShares = {0.99, 0.97, 0.95, 0.9, 0.8};
    if (round == kShares.size()) local.set_error(1);
    Policy policy = search.best();
    local.evict(static_cast<int64_t>(static_cast<double>(budget) * kShares[round % kShares.size()]), policy);
    if (search.try_policy(policy).peak_bytes > budget) continue;
    local.fill(budget, policy);
    search.try_policy(policy);
  }
}

// Drops values from the policy with the smallest peak, one percent of the peak at a time.
void find_smallest(const TraceIndex& index, Search& search, Policy policy) {
  LocalSearch local(index, search.simulator());
  int64_t smallest = search.try_policy(policy).peak_bytes;
  constexpr int kMaxSteps = 50;
  for (int step = 0; step < kMaxSteps; ++step) {
    constexpr double kStep = 0.99;
    local.evict(static_cast<int64_t>(static_cast<double>(smallest) * kStep), policy);
    const int64_t now = search.try_policy(policy).peak_bytes;
    if (now >= smallest) return;
    smallest = now;
  }
}

Policy everything_saved(const TraceIndex& index) {
  Policy policy(index.num_values(), kRecompute);
  for (int32_t value = 0; value < index.num_values(); ++value) {
    if (index.trace.values[value].can_save) policy[value] = kSave;
  }
  return policy;
}

}  // namespace

Solution solve(const Trace& trace, int64_t budget_bytes, const SolverParts& parts) {
  if (budget_bytes <= 0) throw UserError(text("budget_bytes is ", budget_bytes, ": expected more than 0"));
  const TraceIndex index(trace);
  Search search(index, budget_bytes);
  double bound_seconds = 0;
  std::vector<Policy> policies;
  if (parts.min_cut) {
    PricedSearch priced(index, search);
    bound_seconds = priced.bound();
    priced.find_fitting();
    policies = priced.closest();
  } else {
    search.try_policy(everything_saved(index));
  }
  if (parts.segments) {
    const Segments segments(index, parts.min_cut);
    const Policy smallest = segments.smallest();
    search.try_policy(smallest);
    if (parts.local_search) find_smallest(index, search, smallest);
    for (Policy& policy : in_segments(segments, search)) policies.push_back(std::move(policy));
  }
  if (policies.empty()) policies.push_back(search.best());
  if (parts.local_search) improve(index, search, std::move(policies), bound_seconds);
  return search.solution(bound_seconds);
}

}  // namespace drivetrain::budget
