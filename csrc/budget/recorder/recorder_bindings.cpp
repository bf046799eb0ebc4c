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
#include "budget/recorder/dispatch.h"
#include "budget/recorder/recorder.h"

namespace py = pybind11;

namespace drivetrain::budget {
namespace {

// The fields of PlannedOp, in the order in which `python/drivetrain/budget/plan.py` names them.
using PlainPlannedOp = std::tuple<std::string, std::vector<int8_t>, bool, uint64_t,
                                  std::vector<std::vector<PlannedWrite>>, std::string, std::vector<int32_t>, int64_t>;

std::shared_ptr<TapePlan> plan_of(const std::vector<PlainPlannedOp>& ops) {
  auto plan = std::make_shared<TapePlan>();
  plan->seconds.resize(ops.size());
  for (const PlainPlannedOp& fields : ops) {
    auto op = std::make_from_tuple<PlannedOp>(fields);
    op.numbers.resize(op.formats.size());
    plan->by_name[op.name].push_back(static_cast<int32_t>(plan->ops.size()));
    plan->ops.push_back(std::move(op));
  }
  return plan;
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
            std::vector<std::shared_ptr<TapePlan>> made;
            for (const std::vector<PlainPlannedOp>& plan : plans) made.push_back(plan_of(plan));
            recorder.set_plans(std::move(made));
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
