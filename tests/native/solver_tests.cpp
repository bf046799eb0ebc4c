// Tests the activation budget's solver on random traces, mainly for the sanitizers.
#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "base/check.h"
#include "budget/solver/solver.h"
#include "native_tests.h"

namespace drivetrain {
namespace {

using budget::Keeping;
using budget::kForget;
using budget::Outcome;
using budget::Solution;
using budget::Trace;

// Returns a random trace: ops with one or two outputs, some in place, values that no op can replay, storage formats and
// uses.
Trace any_trace(int num_ops, std::minstd_rand& random) {
  Trace trace;
  const auto any = [&](int64_t below) { return static_cast<int32_t>(random() % static_cast<uint64_t>(below)); };
  const auto add_value = [&] {
    trace.values.push_back({1 + any(9), true, any(12) > 0, -1, {}});
    if (any(4) == 0) trace.values.back().forms.push_back({any(3), 0.5 * any(4)});
    return static_cast<int32_t>(trace.values.size()) - 1;
  };
  add_value();
  for (int i = 0; i < num_ops; ++i) {
    budget::TraceOp op{1.0 * any(9), {}, {}};
    const auto count = static_cast<int32_t>(trace.values.size());
    for (int read = any(3); read >= 0; --read) op.reads.push_back(count - 1 - any(std::min(count, 12)));
    for (int written = any(2); written >= 0; --written) op.writes.push_back(add_value());
    budget::TraceValue& replaced = trace.values[op.reads[0]];
    if (any(5) == 0 && replaced.can_keep && replaced.can_forget) {
      replaced.can_keep = false;
      trace.values[op.writes[0]].replaces = op.reads[0];
    }
    trace.ops.push_back(std::move(op));
  }
  for (int32_t value = static_cast<int32_t>(trace.values.size()) - 1; value >= 0; --value) {
    if (any(3) == 0) continue;
    if (any(9) > 0) trace.uses.push_back({value, false});
    trace.uses.push_back({value, true});
  }
  return trace;
}

void test_any_traces() {
  std::minstd_rand random(1);
  int num_feasible = 0;
  for (int round = 0; round < 24; ++round) {
    const Trace trace = any_trace(round % 8 == 0 ? 60 : 10, random);
    int64_t most = 1;
    for (const budget::TraceValue& value : trace.values) most += value.bytes;
    for (int64_t budget : {most / 4 + 1, most / 2 + 1, most * 2}) {
      Solution solution;
      try {
        solution = budget::solve(trace, budget);
      } catch (const UserError&) {
        continue;  // a used value can neither be kept nor replayed
      }
      const Outcome again = budget::simulate(trace, solution.keeping);
      expect(again.peak_bytes == solution.outcome.peak_bytes && again.seconds == solution.outcome.seconds,
             "a solution agrees with its simulation");
      expect(solution.is_feasible == (again.peak_bytes <= budget),
             "a solution is feasible if its peak fits the budget, and only then");
      expect(solution.bound_seconds <= again.seconds || !solution.is_feasible, "no solution is below the bound");
      num_feasible += solution.is_feasible;
    }
  }
  expect(num_feasible > 24, "most budgets have solutions");
}

// A recursive solver would overflow the stack here.
void test_long_chain() {
  constexpr int32_t kCount = 100'000;
  Trace trace;
  for (int32_t i = 0; i < kCount; ++i) {
    trace.values.push_back({1, true, true, -1, {}});
    trace.ops.push_back({1, {}, {i}});
    if (i > 0) trace.ops.back().reads.push_back(i - 1);
  }
  trace.uses = {{kCount - 1, false}, {kCount - 1, true}};
  const Outcome outcome = budget::simulate(trace, Keeping(kCount, kForget));
  expect(outcome.seconds == kCount && outcome.peak_bytes == 2, "a long chain is replayed once");
}

void test_traces_without_anything() {
  for (const Trace& trace : {Trace{}, Trace{{{4, true, true, -1, {}}}, {}, {{0, false}, {0, true}}}}) {
    const Solution solution = budget::solve(trace, 1);
    expect(solution.is_feasible && solution.outcome.peak_bytes == 0, "a trace without writes keeps nothing");
  }
}

}  // namespace

void test_solver() {
  test_any_traces();
  test_long_chain();
  test_traces_without_anything();
}

}  // namespace drivetrain
