// Registers the recorder with Python, and converts plans from and traces to tuples.
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "budget/budget.h"
#include "budget/recorder/call.h"
#include "budget/recorder/dispatch.h"
#include "budget/recorder/recorder.h"

namespace py = pybind11;

namespace drivetrain::budget {
namespace {

// The fields of PlannedOp, in the order in which `python/drivetrain/budget/plan.py` names them.
using PlainPlannedOp = std::tuple<std::string, std::vector<int8_t>, bool, uint64_t,
                                  std::vector<std::vector<PlannedWrite>>, std::string, std::vector<int32_t>, int64_t>;

std::vector<TapePlan> plans_of(const std::vector<std::vector<PlainPlannedOp>>& plans) {
  std::vector<TapePlan> made;
  for (const auto& plan : plans) {
    std::vector<PlannedOp>& ops = made.emplace_back().ops;
    for (const auto& [name, formats, is_replayed, arguments, prefetches, module, numbers, most] : plan) {
      ops.push_back({name, formats, is_replayed, arguments, prefetches, module, numbers, most});
      ops.back().numbers.resize(formats.size());
    }
  }
  return made;
}

// Returns the trace of a pass as `python/drivetrain/budget/trace.py` names its fields.
py::dict plain_trace(const Profile& profile) {
  py::dict made;
  made["saves"] = profile.saves();
  made["arguments"] = profile.arguments();
  made["values"] = profile.value_traces();
  made["ops"] = profile.op_traces();
  made["uses"] = profile.uses();
  made["begin"] = profile.begin();
  made["has_failed"] = profile.has_failed();
  return made;
}

}  // namespace

void register_recorder(py::module_& m) {
  m.attr("ActivationProfileEnded") = py::handle(profile_ended());
  const auto count = [](auto Counts::* field) {
    return [field](Recorder& recorder) { return recorder.shared().tracker.counts().*field; };
  };
  py::class_<Recorder, std::shared_ptr<Recorder>>(m, "ActivationRecorder")
      .def(py::init([](bool is_profile) { return std::make_shared<Recorder>(is_profile); }),
           py::arg("is_profile") = false)
      .def(
          "set_plans",
          [](Recorder& recorder, const std::vector<std::vector<PlainPlannedOp>>& plans) {
            recorder.set_plans(plans_of(plans));
          },
          py::arg("plans"))
      .def(
          "set_formats",
          [](Recorder& recorder, std::vector<int8_t> tried, std::shared_ptr<saved_tensors::HostPool> pool,
             int64_t budget_bytes) {
            recorder.shared().tried_formats = std::move(tried);
            recorder.shared().pool = std::move(pool);
            recorder.shared().budget_bytes = budget_bytes;
          },
          py::arg("tried"), py::arg("pool"), py::arg("budget_bytes"))
      .def(
          "set_limit", [](Recorder& recorder, int64_t bytes) { recorder.shared().tracker.set_limit(bytes); },
          py::arg("bytes"))
      .def("abandon", &Recorder::abandon)
      .def("stop", &Recorder::stop)
      .def(
          "set_model",
          [](Recorder& recorder, const py::object& model) {
            recorder.shared().model =
                std::make_shared<const c10::SafePyObject>(py::weakref(model).release().ptr(), getPyInterpreter());
          },
          py::arg("model"))
      .def("take_tapes",
           [](Recorder& recorder) {
             py::list tapes;
             for (const auto& pass : recorder.take_profiled()) tapes.append(plain_trace(*pass->profile()));
             return tapes;
           })
      .def("reset", &Recorder::reset)
      .def("seconds_by_op", &Recorder::seconds_by_op)
      .def_property_readonly("live_bytes", count(&Counts::live_bytes))
      .def_property_readonly("peak_bytes", count(&Counts::peak_bytes))
      .def_property_readonly("exceeding_bytes", count(&Counts::exceeding_bytes))
      .def_property_readonly("num_replayed", count(&Counts::num_replayed))
      .def_property_readonly("replay_seconds", count(&Counts::replay_seconds))
      .def_property_readonly("divergence", &Recorder::divergence);
  register_calls(m);
  m.def("activation_recorder_key", [] { return std::string(c10::toString(kRecorderKey)); });
}

}  // namespace drivetrain::budget
