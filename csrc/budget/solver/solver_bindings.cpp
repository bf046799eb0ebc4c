// Binds the solver to Python on plain lists of tuples.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "budget/budget.h"
#include "budget/solver/simulator.h"
#include "budget/solver/solver.h"

namespace py = pybind11;

namespace drivetrain::budget {
namespace {

using PlainFormat = std::pair<int64_t, double>;
using PlainValue = std::tuple<int64_t, bool, bool, int32_t, std::vector<PlainFormat>>;
using PlainOp = std::tuple<double, std::vector<int32_t>, std::vector<int32_t>>;
using PlainUse = std::pair<int32_t, bool>;

Trace trace_of(const std::vector<PlainValue>& values, const std::vector<PlainOp>& ops,
               const std::vector<PlainUse>& uses) {
  Trace trace;
  for (const auto& [bytes, can_save, can_recompute, replaces, formats] : values) {
    TraceValue value{bytes, can_save, can_recompute, replaces, {}};
    for (const auto& [format_bytes, seconds] : formats) value.formats.push_back({format_bytes, seconds});
    trace.values.push_back(std::move(value));
  }
  for (const auto& [seconds, reads, writes] : ops) trace.ops.push_back({seconds, reads, writes});
  for (const auto& [value, is_release] : uses) trace.uses.push_back({value, is_release});
  return trace;
}

py::dict plain(const Outcome& outcome) {
  py::dict dict;
  dict["peak_bytes"] = outcome.peak_bytes;
  dict["seconds"] = outcome.seconds;
  dict["forward_bytes"] = outcome.forward_bytes;
  return dict;
}

py::dict solve_plain(const std::vector<PlainValue>& values, const std::vector<PlainOp>& ops,
                     const std::vector<PlainUse>& uses, int64_t budget_bytes) {
  const Trace trace = trace_of(values, ops, uses);
  Solution solution;
  {
    py::gil_scoped_release no_gil;
    solution = solve(trace, budget_bytes);
  }
  py::dict dict = plain(solution.outcome);
  dict["policy"] = std::vector<int>(solution.policy.begin(), solution.policy.end());
  dict["bound_seconds"] = solution.bound_seconds;
  dict["is_feasible"] = solution.is_feasible;
  dict["smallest_bytes"] = solution.smallest_bytes;
  return dict;
}

Policy policy_of(const std::vector<int>& plain) {
  Policy policy;
  for (int entry : plain) {
    if (entry < INT8_MIN || entry > INT8_MAX) {
      throw UserError(text("policy has ", entry, ": expected -1 to the number of storage formats"));
    }
    policy.push_back(static_cast<int8_t>(entry));
  }
  return policy;
}

py::dict simulate_plain(const std::vector<PlainValue>& values, const std::vector<PlainOp>& ops,
                        const std::vector<PlainUse>& uses, const std::vector<int>& plain_policy, bool has_timeline) {
  const Trace trace = trace_of(values, ops, uses);
  const Policy policy = policy_of(plain_policy);
  Timeline timeline;
  Outcome outcome;
  {
    const py::gil_scoped_release no_gil;
    outcome = simulate(trace, policy, &timeline);
  }
  py::dict dict = plain(outcome);
  if (!has_timeline) return dict;
  dict["peaks"] = timeline.peak_bytes;
  dict["restored_at"] = timeline.restored_at;
  return dict;
}

}  // namespace

void register_solver(py::module_& m) {
  m.def("activation_solve", &solve_plain, py::arg("values"), py::arg("ops"), py::arg("uses"), py::arg("budget_bytes"));
  m.def("activation_simulate", &simulate_plain, py::arg("values"), py::arg("ops"), py::arg("uses"), py::arg("policy"),
        py::arg("timeline") = false);
}

}  // namespace drivetrain::budget
