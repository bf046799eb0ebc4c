// Exports the lower bound as a C function for bound.py.
#include <algorithm>
#include <limits>
#include <sstream>

#include "backward_bound.h"
#include "budget/solver/min_cut.h"
#include "budget/solver/trace_index.h"

namespace drivetrain::budget {
namespace {

Trace read_trace(const char* numbers) {
  std::istringstream in(numbers);
  size_t num_values = 0, num_ops = 0, num_uses = 0, count = 0;
  in >> num_values >> num_ops >> num_uses;
  Trace trace;
  trace.values.resize(num_values);
  for (TraceValue& value : trace.values) {
    in >> value.bytes >> value.can_save >> value.can_recompute >> value.replaces >> count;
    value.formats.resize(count);
    for (FormatPrice& format : value.formats) in >> format.bytes >> format.seconds;
  }
  trace.ops.resize(num_ops);
  for (TraceOp& op : trace.ops) {
    in >> op.seconds;
    for (std::vector<int32_t>* list : {&op.reads, &op.writes}) {
      in >> count;
      list->resize(count);
      for (int32_t& value : *list) in >> value;
    }
  }
  trace.uses.resize(num_uses);
  for (TraceUse& use : trace.uses) in >> use.value >> use.is_release;
  return trace;
}

struct PricedBound {
  double seconds = 0;
  double price = 0;  // seconds per byte at which the minimum cut gives this bound
};

// Bisects to the price at which two policies of the minimum cut cost the same: one exceeds the budget after forward.
PricedBound priced_bound(const TraceIndex& index, double budget) {
  double highest_price = 1;
  for (const TraceOp& op : index.trace.ops) highest_price += op.seconds;
  MinCut cut(index);
  PricedPolicy high = cut.at(0), low = cut.at(highest_price);
  PricedBound best{high.bound, 0};
  constexpr int kMaxPrices = 40;
  for (int i = 0; i < kMaxPrices && high.bytes > budget && high.bytes > low.bytes; ++i) {
    const double price = price_between(high, low);
    PricedPolicy now = cut.at(price);
    if (now.bound - price * budget > best.seconds) best = {now.bound - price * budget, price};
    if (now.bytes >= high.bytes || now.bytes <= low.bytes) break;
    (now.bytes > budget ? high : low) = std::move(now);
  }
  return best;
}

}  // namespace
}  // namespace drivetrain::budget

// A negative price stands for the price of the minimum cut. Returns NaN for a trace that contradicts itself.
extern "C" double activation_bound(const char* trace_numbers, int64_t budget_bytes, double enough_seconds, double price,
                                   size_t num_states) {
  using namespace drivetrain::budget;
  try {
    const Trace trace = read_trace(trace_numbers);
    const TraceIndex index(trace);
    PricedBound priced{0, price};
    if (price < 0) priced = priced_bound(index, static_cast<double>(budget_bytes));
    constexpr double kAlmostAll = 1 - 1e-9;  // allows for rounding of sums
    const double bound = bound_in_backward(index, budget_bytes, {enough_seconds, priced.price, num_states});
    return std::max(priced.seconds * kAlmostAll, bound);
  } catch (const std::exception&) {
    return std::numeric_limits<double>::quiet_NaN();
  }
}
