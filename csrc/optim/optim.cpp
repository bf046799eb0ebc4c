// The optimizer step's boundary: reads the step, picks device and instruction set, and registers it with Python.
#include "optim/optim.h"

#include <ATen/Parallel.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "grad/norm.h"
#include "grad/reduced_norm.h"
#include "optim/adafactor.h"
#include "optim/hypers.h"
#include "optim/launch.h"
#include "optim/layer.h"
#include "optim/muon.h"
#include "optim/state.h"
#include "optim/step_reader.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

// What has been read and checked, done: counters, versions, launches. Needs no GIL.
void run(const StepReader& read, const GradTreatment& treatment) {
  constexpr int64_t kGrain = 64;  // parameters that are worth a thread
  at::parallel_for(0, static_cast<int64_t>(read.written.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto& [param, grad, counter] = read.written[i];
      param->bump_version();
      if (treatment.after != GradAfter::kKeep) grad->bump_version();
      if (counter.value == nullptr) continue;
      if (counter.is_double) {
        *static_cast<double*>(counter.value) += 1;
      } else {
        *static_cast<float*>(counter.value) += 1;
      }
    }
  });
  for (const Batch& batch : read.batches) {
    if (batch.total == 0) continue;
    StepJob job = {};
    job.kind = batch.rule->kind;
    job.in_double = batch.in_double;
    job.treatment = treatment;
    job.params = batch.params.data();
    job.num_params = static_cast<int32_t>(batch.params.size());
    job.rules = read.rules.data();
    job.num_rules = static_cast<int32_t>(read.rules.size());
    job.total = batch.total;
    if (job.kind == RuleKind::kAdafactor) {
      run_adafactor(job, batch.rule->adapt);
    } else if (batch.rule->adapt != nullptr) {
      run_layers(job, batch.rule->adapt);
    } else if (job.kind == RuleKind::kMuonMomentum) {
      run_muon(batch.device, job);
    } else {
      run_step(batch.device, job);
    }
    for (const Copy& copy : batch.copies) {
      if (copy.original.defined()) copy.original.detach().copy_(copy.copy);
    }
  }
}

// Of all gradients that the step has read, as they are. Not read again where our DistributedDataParallel has just
// written them.
double norm_of_gradients(const StepReader& read) {
  std::vector<grad::SeenGradient> seen;
  seen.reserve(read.written.size());
  for (const Written& written : read.written) seen.emplace_back(written.grad);
  if (const std::optional<double> known = grad::known_sum_of_squares(seen)) return std::sqrt(*known);
  std::vector<grad::Gradient> gradients;
  for (const Batch& batch : read.batches) {
    DT_INVARIANT(batch.params.empty() || batch.device.is_cpu());
    for (const ParamJob& job : batch.params) gradients.push_back({job.grad, job.numel});
  }
  return std::sqrt(grad::sum_of_squares(gradients));
}

// What a step does besides its rules: unscaling, clipping, looking for overflows, zeroing.
struct StepOptions {
  double grad_scale = 1;  // gradients are divided by it
  double found_inf = 0;   // above 0: nothing is updated
  std::optional<double> max_grad_norm;
  bool check_finite = false;  // as max_grad_norm does: nothing is updated if a gradient is not finite
  bool zero_grads = false;

  bool treats_grads() const { return zero_grads || grad_scale != 1 || max_grad_norm || check_finite; }
};

struct StepResult {
  py::list missing;  // (parameter, index of its group, what users call it): lacks state; nothing has happened then
  std::optional<double> grad_norm;
  bool skipped = false;
};

// The norm's share: what to multiply gradients by; none if the step must not be made.
std::optional<double> grad_factor(const StepReader& read, const StepOptions& options, StepResult& result) {
  double factor = 1 / options.grad_scale;
  if (options.max_grad_norm || options.check_finite) {
    result.grad_norm = norm_of_gradients(read) / options.grad_scale;
    if (!std::isfinite(*result.grad_norm)) return std::nullopt;
  }
  if (options.found_inf > 0) return std::nullopt;
  // As torch.nn.utils.clip_grad_norm_ does it.
  if (options.max_grad_norm) factor *= std::min(1.0, *options.max_grad_norm / (*result.grad_norm + 1e-6));
  return factor;
}

void run(const StepReader& reader, const StepOptions& options, StepResult& result) {
  const std::optional<double> factor = grad_factor(reader, options, result);
  result.skipped = !factor;
  if (factor) {
    const GradAfter unless_zeroed = *factor == 1 ? GradAfter::kKeep : GradAfter::kTreated;
    run(reader, {*factor, options.zero_grads ? GradAfter::kZero : unless_zeroed});
  } else if (options.zero_grads) {  // else the next backward would add to what is not finite
    for (const Written& written : reader.written) {
      at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(written.grad)).zero_();
    }
  }
}

// Whether the step is over before the interpreter, which switches every 5 ms, would have given way.
bool is_short(const StepReader& read) {
  constexpr int64_t kElements = 1 << 22;
  int64_t total = 0;
  for (const Batch& batch : read.batches) {
    if (batch.rule->kind == RuleKind::kMuonMomentum && batch.total > 0) return false;  // its products are long
    total += batch.total;
  }
  return total < kElements;
}

StepResult read_and_run(StepReader& reader, const py::list& groups, const std::vector<std::string>& rules,
                        const py::list& hypers, const std::vector<Precision>& precisions, const py::dict& state,
                        const py::list& fresh, const StepOptions& options) {
  StepResult result;
  reader.begin(state, fresh, options.treats_grads());
  for (size_t i = 0; i < groups.size(); ++i) {
    reader.add_group(groups[i], i, find_rule(rules[i]), hypers[i], precisions[i]);
  }
  reader.read();
  result.missing = reader.missing;
  if (!reader.missing.empty()) return result;
  if (is_short(reader)) {
    run(reader, options, result);
  } else {
    // Other threads may now drop a gradient or a state that the jobs point into.
    const auto owners = reader.owners();
    const py::gil_scoped_release no_gil;
    run(reader, options, result);
  }
  return result;
}

// Makes one step over all groups, rules[i], hypers[i] and precisions[i] being groups[i]'s. See optim/base.py, the only
// caller.
StepResult step(StepReader& reader, const py::list& groups, const std::vector<std::string>& rules,
                const py::list& hypers, const std::vector<Precision>& precisions, const py::dict& state,
                const py::list& fresh, const StepOptions& options) {
  if (reader.busy) {  // two threads step one optimizer
    StepReader own;
    return read_and_run(own, groups, rules, hypers, precisions, state, fresh, options);
  }
  struct Busy {
    bool& flag;
    explicit Busy(bool& f) : flag(f) { flag = true; }
    ~Busy() { flag = false; }
  } const busy(reader.busy);
  return read_and_run(reader, groups, rules, hypers, precisions, state, fresh, options);
}

}  // namespace

void register_optim(py::module_& m) {
  register_state(m);
  py::class_<StepReader>(m, "StepReader").def(py::init());
  py::class_<StepOptions>(m, "StepOptions")
      .def(py::init([](double grad_scale, double found_inf, std::optional<double> max_grad_norm, bool check_finite,
                       bool zero_grads) {
             return StepOptions{grad_scale, found_inf, max_grad_norm, check_finite, zero_grads};
           }),
           py::kw_only(), py::arg("grad_scale") = 1.0, py::arg("found_inf") = 0.0,
           py::arg("max_grad_norm") = std::nullopt, py::arg("check_finite") = false, py::arg("zero_grads") = false);
  py::class_<StepResult>(m, "StepResult")
      .def_readonly("missing", &StepResult::missing)
      .def_readonly("grad_norm", &StepResult::grad_norm)
      .def_readonly("skipped", &StepResult::skipped);
  m.def("optim_step", &step, py::arg("reader"), py::arg("groups"), py::arg("rules"), py::arg("hypers"),
        py::arg("precisions"), py::arg("state"), py::arg("fresh"), py::arg("options"));
  m.def("optim_check_hypers", &check_hypers, py::arg("hypers"), py::arg("group"));
  m.def("num_step_threads", &num_step_threads);
  m.def("has_cuda", &has_cuda);
}

}  // namespace drivetrain::optim
