// The solver of what to keep, on plain lists of tuples: for tests, and to see what it would do.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "budget/budget.h"
#include "budget/solver/backward_bound.h"
#include "budget/solver/simulator.h"
#include "budget/solver/solver.h"
#include "budget/solver/trace_index.h"

namespace py = pybind11;

namespace drivetrain::budget {
namespace {

using PlainForm = std::pair<int64_t, double>;
using PlainValue = std::tuple<int64_t, bool, bool, int32_t, std::vector<PlainForm>>;
using PlainOp = std::tuple<double, std::vector<int32_t>, std::vector<int32_t>>;
using PlainUse = std::pair<int32_t, bool>;

Trace trace_of(const std::vector<PlainValue>& values, const std::vector<PlainOp>& ops,
               const std::vector<PlainUse>& uses) {
  Trace trace;
  for (const auto& [bytes, can_keep, can_forget, replaces, forms] : values) {
    TraceValue value{bytes, can_keep, can_forget, replaces, {}};
    for (const auto& [form_bytes, seconds] : forms) value.forms.push_back({form_bytes, seconds});
    trace.values.push_back(std::move(value));
  }
  for (const auto& [seconds, reads, writes] : ops) trace.ops.push_back({seconds, reads, writes});
  for (const auto& [value, is_release] : uses) trace.uses.push_back({value, is_release});
  return trace;
}

py::dict plain(const Timeline& timeline) {
  py::dict dict;
  dict["peak_bytes"] = timeline.peak_bytes;
  dict["brought_back_at"] = timeline.brought_back_at;
  return dict;
}

py::dict plain(const Outcome& outcome) {
  py::dict dict;
  dict["peak_bytes"] = outcome.peak_bytes;
  dict["seconds"] = outcome.seconds;
  dict["forward_bytes"] = outcome.forward_bytes;
  return dict;
}

SolverParts parts_without(const std::vector<std::string>& without) {
  SolverParts parts;
  for (const std::string& part : without) {
    if (part == "min cut") {
      parts.min_cut = false;
    } else if (part == "segments") {
      parts.segments = false;
    } else if (part == "segments anywhere") {
      parts.segments_anywhere = false;
    } else if (part == "local search") {
      parts.local_search = false;
    } else {
      throw UserError(text("without has \"", part, "\": expected min cut, segments, segments anywhere or local search"));
    }
  }
  return parts;
}

py::dict solve_plain(const std::vector<PlainValue>& values, const std::vector<PlainOp>& ops,
                     const std::vector<PlainUse>& uses, int64_t budget_bytes, const std::vector<std::string>& without) {
  const Trace trace = trace_of(values, ops, uses);
  const SolverParts parts = parts_without(without);
  Solution solution;
  {
    py::gil_scoped_release no_gil;
    solution = solve(trace, budget_bytes, parts);
  }
  py::dict dict = plain(solution.outcome);
  dict["keeping"] = std::vector<int>(solution.keeping.begin(), solution.keeping.end());
  dict["bound_seconds"] = solution.bound_seconds;
  dict["is_feasible"] = solution.is_feasible;
  dict["smallest_bytes"] = solution.smallest_bytes;
  return dict;
}

Keeping keeping_of(const std::vector<int>& plain) {
  Keeping ways;
  for (int way : plain) {
    if (way < INT8_MIN || way > INT8_MAX)
      throw UserError(text("keeping has ", way, ": expected -1 to the number of forms"));
    ways.push_back(static_cast<int8_t>(way));
  }
  return ways;
}

// What `ask` says of keeping those values of a trace.
template <typename Answer, Answer (*ask)(const Trace&, const Keeping&)>
py::dict ask_plain(const std::vector<PlainValue>& values, const std::vector<PlainOp>& ops,
                   const std::vector<PlainUse>& uses, const std::vector<int>& keeping) {
  const Trace trace = trace_of(values, ops, uses);
  const Keeping ways = keeping_of(keeping);
  const auto answer = [&] {
    const py::gil_scoped_release no_gil;
    return ask(trace, ways);
  }();
  return plain(answer);
}

double bound_plain(const std::vector<PlainValue>& values, const std::vector<PlainOp>& ops,
                   const std::vector<PlainUse>& uses, int64_t budget_bytes, double enough_seconds, double price,
                   size_t num_choices) {
  const Trace trace = trace_of(values, ops, uses);
  py::gil_scoped_release no_gil;
  return bound_in_backward(TraceIndex(trace), budget_bytes, {enough_seconds, price, num_choices});
}

}  // namespace

void register_solver(py::module_& m) {
  m.def("activation_solve", &solve_plain, py::arg("values"), py::arg("ops"), py::arg("uses"), py::arg("budget_bytes"),
        py::arg("without") = std::vector<std::string>());
  m.def("activation_bound", &bound_plain, py::arg("values"), py::arg("ops"), py::arg("uses"), py::arg("budget_bytes"),
        py::arg("enough_seconds"), py::arg("price"), py::arg("num_choices"));
  m.def("activation_timeline", &ask_plain<Timeline, timeline_of>, py::arg("values"), py::arg("ops"), py::arg("uses"),
        py::arg("keeping"));
  m.def("activation_simulate", &ask_plain<Outcome, simulate>, py::arg("values"), py::arg("ops"), py::arg("uses"),
        py::arg("keeping"));
}

}  // namespace drivetrain::budget
