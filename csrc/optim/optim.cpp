// The optimizer step's boundary: reads the step, picks device and instruction set, and registers it with Python.
#include "optim/optim.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "optim/step_reader.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

void run_cpu(const StepJob& job) {
  void (*step)(const StepJob&, int64_t, int64_t) = nullptr;
  switch (chosen_isa()) {
    case Isa::kBaseline:
      step = baseline::step_cpu;
      break;
    case Isa::kAvx2:
      step = avx2::step_cpu;
      break;
    case Isa::kAvx512:
      step = avx512::step_cpu;
      break;
  }
  constexpr int64_t kGrain = 1 << 15;  // elements that are worth a thread
  at::parallel_for(0, job.total, kGrain, [&](int64_t begin, int64_t end) { step(job, begin, end); });
}

// How many threads a large step really runs on. (1 in a build without OpenMP, whatever torch.get_num_threads() says.)
int num_step_threads() {
  std::atomic<int> threads{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) { ++threads; });
  return threads;
}

// Copies the job's tables to the device, on its current stream, and launches there.
void run_cuda(StepJob job, const Batch& batch, const std::vector<RuleArgs>& rules) {
  const c10::DeviceGuard guard(batch.device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(batch.device.type()).getStream(batch.device);
  const size_t params_bytes = batch.params.size() * sizeof(ParamJob), rules_bytes = rules.size() * sizeof(RuleArgs);
  at::Tensor table = at::empty({static_cast<int64_t>(params_bytes + rules_bytes)}, at::kByte);
  std::memcpy(table.data_ptr(), batch.params.data(), params_bytes);
  std::memcpy(static_cast<char*>(table.data_ptr()) + params_bytes, rules.data(), rules_bytes);
  // From pageable memory the copy has left `table` when it returns, without waiting for the device's queue.
  const at::Tensor on_device = table.to(batch.device, /*non_blocking=*/true);
  job.params = static_cast<const ParamJob*>(on_device.data_ptr());
  job.rules = reinterpret_cast<const RuleArgs*>(static_cast<const char*>(on_device.data_ptr()) + params_bytes);
  step_cuda(job, stream.native_handle());
}

// What has been read and checked, done: counters, versions, launches. Needs no GIL.
void run(const StepReader& read) {
  for (const StepCounter& counter : read.counters) {
    if (counter.is_double) {
      *static_cast<double*>(counter.value) += 1;
    } else {
      *static_cast<float*>(counter.value) += 1;
    }
  }
  for (c10::TensorImpl* tensor : read.written) tensor->bump_version();
  for (const Batch& batch : read.batches) {
    StepJob job = {};
    job.kind = batch.rule->kind;
    job.in_double = batch.in_double;
    job.params = batch.params.data();
    job.num_params = static_cast<int32_t>(batch.params.size());
    job.rules = read.rules.data();
    job.total = batch.total;
    if (batch.device.is_cpu()) {
      run_cpu(job);
    } else {
      run_cuda(job, batch, read.rules);
    }
    for (const Copy& copy : batch.copies) {
      if (copy.original.defined()) copy.original.detach().copy_(copy.copy);
    }
  }
}

// Makes one step over all groups, rules[i] and hypers[i] being groups[i]'s; or, if parameters lack state, returns them
// (each with its group's index) and has changed nothing. See optim/base.py, the only caller.
py::list step(const py::list& groups, const std::vector<std::string>& rules, const py::list& hypers,
              const py::dict& state, const py::list& fresh, Footprints& footprints) {
  StepReader reader(state, fresh, footprints);
  for (size_t i = 0; i < groups.size(); ++i) reader.add_group(groups[i], i, find_rule(rules[i]), hypers[i]);
  reader.read();
  if (reader.missing.empty()) {
    const py::gil_scoped_release no_gil;
    run(reader);
  }
  return reader.missing;
}

}  // namespace

void register_optim(py::module_& m) {
  py::class_<Footprints>(m, "Footprints").def(py::init());
  m.def("optim_step", &step, py::arg("groups"), py::arg("rules"), py::arg("hypers"), py::arg("state"), py::arg("fresh"),
        py::arg("footprints"));
  m.def(
      "optim_state_names",
      [](const std::string& rule) {
        const RuleInfo& info = find_rule(rule);
        std::vector<std::string> names;
        if (info.counts_steps) names.emplace_back("step");
        for (PyObject* name : info.state_names) names.push_back(py::handle(name).cast<std::string>());
        return names;
      },
      py::arg("rule"));
  m.def("num_step_threads", &num_step_threads);
  m.def("has_cuda", &has_cuda);
}

}  // namespace drivetrain::optim
