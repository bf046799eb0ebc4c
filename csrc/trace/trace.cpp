// Binds the process's trace to Python.
#include "trace/trace.h"

#include <pybind11/stl.h>

#include <string>

#include "base/check.h"
#include "trace/reader.h"
#include "trace/span.h"

namespace py = pybind11;

namespace drivetrain::trace {
namespace {

Phase checked(int64_t phase) {
  if (phase < 0 || phase >= static_cast<int64_t>(kNumPhases)) {
    throw UserError("phase is " + std::to_string(phase) + ", expected 0 to " + std::to_string(kNumPhases - 1));
  }
  return static_cast<Phase>(phase);
}

void begin_checked(int64_t phase) {
  if (is_on()) begin(checked(phase));
}

void end_checked(int64_t phase) {
  if (is_on()) end(checked(phase));
}

void end_step_if_on(int64_t step) {
  if (is_on()) end_step(step);
}

}  // namespace

void register_trace(py::module_& m) {
  m.def("trace_is_on", &is_on);
  m.def("trace_begin", &begin_checked, py::arg("phase"));
  m.def("trace_end", &end_checked, py::arg("phase"));
  m.def("trace_step", &end_step_if_on, py::arg("step"));
  py::class_<StepAccount>(m, "StepAccount")
      .def_readonly("step", &StepAccount::step)
      .def_readonly("begin_ns", &StepAccount::begin_ns)
      .def_readonly("wall_ns", &StepAccount::wall_ns)
      .def_readonly("phase_ns", &StepAccount::phase_ns)
      .def_readonly("num_forwards", &StepAccount::num_forwards)
      .def_readonly("is_complete", &StepAccount::is_complete);
  py::class_<Standing>(m, "TraceStanding")
      .def_property_readonly("phase", [](const Standing& standing) { return static_cast<int64_t>(standing.phase); })
      .def_readonly("since_ns", &Standing::since_ns)
      .def_readonly("longest_ns", &Standing::longest_ns);
  py::class_<TraceReader>(m, "TraceReader")
      .def(py::init<bool>(), py::kw_only(), py::arg("sees_forwards"))
      .def("follow_device", &TraceReader::follow_device, py::arg("device"))
      .def("read", &TraceReader::read, py::call_guard<py::gil_scoped_release>())
      .def("standing", &TraceReader::standing, py::call_guard<py::gil_scoped_release>())
      .def("stop", &TraceReader::stop)
      .def("has_read_all", &TraceReader::has_read_all, py::call_guard<py::gil_scoped_release>())
      .def("num_read", &TraceReader::num_read, py::call_guard<py::gil_scoped_release>())
      .def("num_refused", &TraceReader::num_refused);
}

}  // namespace drivetrain::trace
