// Registers the optimizer step with Python: reads the step, and picks device and instruction set.
#include "optim/optim.h"

#include <ATen/ops/tensor.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "base/hash.h"
#include "base/parallel.h"
#include "base/stream_order.h"
#include "base/torch_text.h"
#include "ddp/transport/torch/torch_group.h"
#include "formats/storage_torch.h"
#include "grad/norm.h"
#include "optim/adafactor.h"
#include "optim/grad_scaling.h"
#include "optim/hypers.h"
#include "optim/launch.h"
#include "optim/measured.h"
#include "optim/muon.h"
#include "optim/run_cuda.h"
#include "optim/step_reader.h"
#include "optim/trust_ratio.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

// Returns the batches with parameters by their first ones. The reader keeps them in the order of earlier steps. The
// bits of a norm and the order of Muon's exchanges must not depend on it.
std::vector<Batch*> batches_by_parameter(StepReader& read) {
  std::vector<Batch*> batches;
  for (Batch& batch : read.batches) {
    if (!batch.params.empty()) batches.push_back(&batch);
  }
  std::sort(batches.begin(), batches.end(),
            [](const Batch* a, const Batch* b) { return a->written_of[0] < b->written_of[0]; });
  return batches;
}

// Executes a step that was read and checked: counters, versions, launches. Needs no GIL. See StepJob for `on_device`.
// `measured` receives statistics of each batch unless it is null.
void run(StepReader& read, const std::vector<Batch*>& batches, const GradScaling& grad_scaling,
         const GradScaling* on_device, std::vector<std::shared_ptr<Measured>>* measured) {
  const bool writes_grads = on_device != nullptr || grad_scaling.after != GradAfter::kKeep;
  constexpr int64_t kGrain = 512;  // parameters per thread at least
  parallel_for(0, static_cast<int64_t>(read.written.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      constexpr int64_t kAhead = 16;
      if (const int64_t ahead = i + kAhead; ahead < end) {
        __builtin_prefetch(read.written[ahead].param);
        __builtin_prefetch(read.written[ahead].counter.value);
      }
      const auto& [param, grad, counter] = read.written[i];
      param->bump_version();
      if (writes_grads) grad->bump_version();
      if (counter.value == nullptr) continue;
      if (counter.is_double) {
        *static_cast<double*>(counter.value) += 1;
      } else {
        *static_cast<float*>(counter.value) += 1;
      }
    }
  });
  for (const auto& [scalar, value] : read.advanced_scalars) {
    if (scalar.is_double) {
      *static_cast<double*>(scalar.value) = value;
    } else {
      *static_cast<float*>(scalar.value) = static_cast<float>(value);
    }
  }
  for (Batch* const each : batches) {
    Batch& batch = *each;
    StepJob job = {};
    job.kind = batch.rule->kind;
    job.in_double = batch.in_double;
    job.grad_scaling = grad_scaling;
    job.grad_scaling_on_device = on_device;
    job.params = batch.params.data();
    job.num_params = static_cast<int32_t>(batch.params.size());
    job.rules = read.rules.data();
    job.num_rules = static_cast<int32_t>(read.rules.size());
    job.total = batch.total;
    job.num_chunks = batch.num_chunks;
    if (measured != nullptr) {
      measured->push_back(std::make_shared<Measured>(batch));
      job.statistics = measured->back()->chunks();
    }
    if (batch.device.is_cuda()) {
      run_on_device(batch, job);
    } else if (job.kind == RuleKind::kAdafactor) {
      run_adafactor(job, batch.rule->adapt);
    } else if (batch.rule->adapt != nullptr) {
      run_trust_ratio(job, batch.rule->adapt);
    } else if (job.kind == RuleKind::kMuonMomentum) {
      run_muon_cpu(batch.muon, job);
      batch.muon = {};
    } else {
      run_step_cpu(job, 0, job.total);
    }
    for (const Copy& copy : batch.copies) {
      if (copy.original.defined()) copy.original.detach().copy_(copy.copy);
    }
  }
}

// Sums the squares of all gradients of the step.
double sum_of_squares(const std::vector<Batch*>& batches) {
  std::vector<grad::Gradient> gradients;
  for (const Batch* batch : batches) {
    DT_INVARIANT(batch->device.is_cpu());
    for (const ParamJob& job : batch->params) gradients.push_back({job.grad, job.numel});
  }
  return grad::sum_of_squares(gradients);
}

// Sums the squares of floating values [any], chunk by chunk in memory order: float64 [chunks] on their device.
at::Tensor chunk_sums(const at::Tensor& values) {
  if (!values.is_contiguous() || !formats::format_of(values.scalar_type())) {
    throw UserTypeError(text("values are ", values.scalar_type(), " with strides ", values.strides(),
                             ", expected contiguous floating values."));
  }
  if (values.is_cuda()) return chunk_sums_on_device(values);
  return at::tensor(grad::chunk_sums({{formats::array_of(values), formats::real_numel(values)}}), at::kDouble);
}

// Options of a step besides its rules: unscaling, clipping, overflow checks, zeroing.
struct StepOptions {
  using Scalar = std::variant<double, at::Tensor>;  // a tensor has one element on a CUDA device
  Scalar grad_scale = 1.0;                          // divides gradients
  Scalar found_inf = 0.0;                           // above 0: skips the step
  std::optional<double> max_grad_norm;
  bool check_finite = false;  // skips the step if a gradient is not finite, as max_grad_norm does
  bool zero_grads = false;
  std::optional<at::Tensor> overflow;  // receives 1 if a gradient is not finite, else 0
  // float64 [any]: sums of chunks that replace the step's own, where ranks share its gradients.
  std::optional<at::Tensor> sum_of_squares = std::nullopt;
  bool statistics = false;  // measures each parameter
  std::optional<MuonRanks> matrix_ranks = std::nullopt;

  bool measures() const { return max_grad_norm || check_finite; }
  // On CUDA only the device knows the numbers that the grad scaling depends on.
  bool is_for_the_device() const {
    return measures() || std::holds_alternative<at::Tensor>(grad_scale) ||
           std::holds_alternative<at::Tensor>(found_inf);
  }
  bool writes_grads() const { return zero_grads || is_for_the_device() || std::get<double>(grad_scale) != 1; }

  GradScalingOptions asked() const {
    GradScalingOptions asked;
    if (const double* scale = std::get_if<double>(&grad_scale)) asked.grad_scale = *scale;
    if (const double* found = std::get_if<double>(&found_inf)) asked.found_inf = *found;
    asked.measures = measures();
    if (max_grad_norm) asked.max_norm = *max_grad_norm;
    asked.zeroes = zero_grads;
    return asked;
  }

  // Moves the tensors to the gradients' device; a scaler's may be on another.
  void move_to(c10::Device device) {
    for (Scalar* scalar : {&grad_scale, &found_inf}) {
      if (auto* tensor = std::get_if<at::Tensor>(scalar))
        *tensor = tensor->to(device, at::kFloat, /*non_blocking=*/true);
    }
    if (sum_of_squares) sum_of_squares = sum_of_squares->to(device, at::kDouble, /*non_blocking=*/true);
  }
  GradScalingScalars scalars() const {
    const auto data = [](const Scalar& scalar) {
      const at::Tensor* tensor = std::get_if<at::Tensor>(&scalar);
      return tensor == nullptr ? nullptr : tensor->const_data_ptr<float>();
    };
    return {data(grad_scale), data(found_inf), overflow ? overflow->mutable_data_ptr<float>() : nullptr};
  }
};

class StepResult {
 public:
  py::list missing;           // (parameter, index of its group, label): lacks state, so nothing was done
  bool has_wrappers = false;  // see StepReader; nothing was done then
  bool measures = false;
  GradScaling grad_scaling;
  at::Tensor on_device;  // the grad scaling as bytes, if only the device knows it
  std::vector<std::shared_ptr<Measured>> measured;
  py::list statistics;  // tuples of a parameter, the Measured that has its record, and its index there

  // Both functions wait for the device.
  std::optional<double> grad_norm() const { return measures ? std::optional(get().norm) : std::nullopt; }
  bool skipped() const { return get().skips; }

 private:
  GradScaling get() const {
    if (!on_device.defined()) return grad_scaling;
    const py::gil_scoped_release no_gil;
    const at::Tensor here = on_device.cpu();
    GradScaling result;
    std::memcpy(&result, here.const_data_ptr(), sizeof(result));
    return result;
  }
};

// Returns whether the batches' device computes the grad scaling, in place of the host. Throws if the options need
// gradients on one device and they are on several.
bool is_scaled_on_device(const std::vector<Batch*>& batches, const StepOptions& options) {
  if (!options.is_for_the_device() || batches.empty()) return false;
  for (const Batch* batch : batches) {
    if (batch->device != batches.front()->device) {
      throw UnsupportedError(text("param_groups has gradients on ", batches.front()->device.str(), " and ",
                                  batch->device.str(),
                                  ". max_grad_norm, and grad_scale and found_inf as a GradScaler sets them, need all "
                                  "gradients of an optimizer on one device. Construct one optimizer for each device."));
    }
  }
  return !batches.front()->device.is_cpu();
}

// Plans steps of matrices, in an order that all ranks share. Throws if ranks step others, before anything changes.
void plan_matrices(StepReader& reader, const std::vector<Batch*>& batches, const MuonRanks& of_step, bool skips) {
  MuonTotals totals;
  totals.skips = skips;
  for (Batch* const batch : batches) {
    if (batch->rule->kind != RuleKind::kMuonMomentum || skips) continue;
    std::vector<MuonArgs> args;
    MuonRanks ranks = of_step;
    ranks.device = batch->device;
    ranks.whole_rows.clear();
    for (size_t i = 0; i < batch->params.size(); ++i) {
      args.push_back(batch->device.is_cuda() ? MuonArgs::make(batch->numbers[batch->starts[i].numbers].hypers, 1)
                                             : reader.rules[batch->params[i].rule].as<MuonArgs>());
      if (of_step.hold_rows()) ranks.whole_rows.push_back(of_step.whole_rows.at(batch->written_of[i]));
    }
    const c10::DeviceGuard guard(batch->device);
    batch->muon = plan_muon(batch->params.data(), args, std::move(ranks), totals);
  }
  check_totals(of_step, totals, reader.agreed_matrices);
}

// Returns whether a CUDA graph captures the step. The copy of statistics would belong to it.
bool is_captured(const Batch* batch) { return batch->device.is_cuda() && is_capturing_on(batch->device); }

void run(StepReader& reader, const std::vector<Batch*>& batches, const StepOptions& options, bool is_on_device,
         StepResult& result) {
  const GradScalingOptions asked = options.asked();
  result.measures = asked.measures;
  const auto sum = [&] {
    if (!options.sum_of_squares) return sum_of_squares(batches);
    const at::Tensor sums = options.sum_of_squares->to(at::kCPU, at::kDouble).contiguous();
    return grad::sum_of_chunks({sums.data_ptr<double>(), sums.data_ptr<double>() + sums.numel()});
  };
  if (!is_on_device) result.grad_scaling = grad_scaling_of(asked, asked.measures ? sum() : 0);
  plan_matrices(reader, batches, options.matrix_ranks.value_or(MuonRanks()), result.grad_scaling.skips);
  for (Batch* const batch : batches) {
    if (batch->device.is_cuda()) place_on_device(*batch);
  }
  const bool measures = options.statistics && std::none_of(batches.begin(), batches.end(), is_captured);
  auto* const measured = measures ? &result.measured : nullptr;
  if (is_on_device) {
    StepOptions placed = options;
    placed.move_to(batches.front()->device);
    result.on_device = compute_grad_scaling_on_device(batches, asked, placed.scalars(), placed.sum_of_squares);
    run(reader, batches, {}, static_cast<const GradScaling*>(result.on_device.const_data_ptr()), measured);
    for (const auto& each : result.measured) each->leave(placed.grad_scale, result.on_device);
    return;
  }
  if (!result.grad_scaling.skips) {
    run(reader, batches, result.grad_scaling, nullptr, measured);
    for (const auto& each : result.measured) each->leave(options.grad_scale, {});
  } else if (asked.zeroes) {  // The next backward must not add to gradients that are not finite.
    for (const Written& written : reader.written) {
      at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(written.grad)).zero_();
    }
  }
}

// Returns whether the step ends before the interpreter, which switches threads every 5 ms, would have switched.
bool is_short(const std::vector<Batch*>& batches) {
  constexpr int64_t kElements = 1 << 22;
  int64_t total = 0;
  for (const Batch* batch : batches) {
    if (batch->rule->kind == RuleKind::kMuonMomentum) return false;  // Muon's products take long.
    total += batch->total;
  }
  return total < kElements;
}

// Makes one step over all groups; rules[i], hypers[i] and precisions[i] belong to groups[i]. Only
// optim/native_step.py calls it.
StepResult step(StepReader& of_optimizer, const py::list& groups, const std::vector<std::string>& rules,
                const py::list& hypers, const std::vector<Precision>& precisions, const py::dict& state,
                const py::list& fresh, const StepOptions& options) {
  StepReader own;
  StepReader& reader = of_optimizer.busy ? own : of_optimizer;  // Two threads step one optimizer.
  struct Busy {
    StepReader& reader;
    explicit Busy(StepReader& r) : reader(r) { reader.busy = true; }
    ~Busy() {
      reader.end();
      reader.busy = false;
    }
  } const busy(reader);
  StepResult result;
  reader.begin(state, fresh, options.writes_grads());
  for (size_t i = 0; i < groups.size(); ++i) {
    reader.add_group(groups[i], i, find_rule(rules[i]), hypers[i], precisions[i]);
  }
  reader.read();
  result.missing = reader.missing;
  result.has_wrappers = reader.has_wrappers;
  if (result.has_wrappers || !reader.missing.empty()) return result;
  const std::vector<Batch*> batches = batches_by_parameter(reader);
  const bool is_on_device = is_scaled_on_device(batches, options);
  const bool keeps_gil = is_short(batches) && !options.matrix_ranks;  // Ranks wait for each other.
  if (!keeps_gil) reader.own();
  std::optional<py::gil_scoped_release> no_gil;
  if (!keeps_gil) no_gil.emplace();
  run(reader, batches, options, is_on_device, result);
  no_gil.reset();
  for (const auto& measured : result.measured) {
    for (size_t i = 0; i < measured->written_of().size(); ++i) {
      result.statistics.append(py::make_tuple(py::handle(reader.param_of(measured->written_of()[i])), measured, i));
    }
  }
  return result;
}

// ranks: the job's numbers of the process group's ranks.
MuonRanks matrix_ranks(const std::string& process_group, const std::string& backend, std::vector<int64_t> ranks,
                       const std::string& device, std::vector<int64_t> whole_rows) {
  auto comm = std::make_shared<ddp::TorchComm>(c10d::resolve_process_group(process_group), backend,
                                               ddp::Ranks(std::move(ranks)));
  const uint64_t group = hash_bytes(process_group.data(), static_cast<int64_t>(process_group.size()));
  const int rank = comm->rank(), size = comm->size();
  return {std::move(comm), c10::Device(device), group, std::move(whole_rows), rank, size};
}

}  // namespace

void register_optim(py::module_& m) {
  register_state(m);
  register_measured(m);
  py::class_<MuonRanks>(m, "MatrixRanks")
      .def(py::init(&matrix_ranks), py::arg("process_group"), py::arg("backend"), py::arg("ranks"), py::arg("device"),
           py::arg("whole_rows") = std::vector<int64_t>());
  py::class_<StepReader>(m, "StepReader").def(py::init());
  py::class_<StepOptions>(m, "StepOptions")
      .def(py::init([](StepOptions::Scalar grad_scale, StepOptions::Scalar found_inf,
                       std::optional<double> max_grad_norm, bool check_finite, bool zero_grads,
                       std::optional<at::Tensor> overflow, bool statistics) {
             return StepOptions{grad_scale, found_inf, max_grad_norm, check_finite,
                                zero_grads, overflow,  std::nullopt,  statistics};
           }),
           py::kw_only(), py::arg("grad_scale") = 1.0, py::arg("found_inf") = 0.0,
           py::arg("max_grad_norm") = std::nullopt, py::arg("check_finite") = false, py::arg("zero_grads") = false,
           py::arg("overflow") = std::nullopt, py::arg("statistics") = false)
      .def_property_readonly("measures", &StepOptions::measures)
      .def_readonly("statistics", &StepOptions::statistics)
      .def_readonly("zero_grads", &StepOptions::zero_grads)
      .def_readwrite("sum_of_squares", &StepOptions::sum_of_squares)
      .def_readwrite("matrix_ranks", &StepOptions::matrix_ranks);
  py::class_<StepResult>(m, "StepResult")
      .def_readonly("missing", &StepResult::missing)
      .def_readonly("has_wrappers", &StepResult::has_wrappers)
      .def_readwrite("statistics", &StepResult::statistics)
      .def_property_readonly("is_on_device", [](const StepResult& result) { return result.on_device.defined(); })
      .def_property_readonly("grad_norm", &StepResult::grad_norm)
      .def_property_readonly("skipped", &StepResult::skipped);
  m.def("optim_step", &step, py::arg("reader"), py::arg("groups"), py::arg("rules"), py::arg("hypers"),
        py::arg("precisions"), py::arg("state"), py::arg("fresh"), py::arg("options"));
  m.def("chunk_sums", &chunk_sums, py::arg("values"), py::call_guard<py::gil_scoped_release>());
  m.def("optim_check_hypers", &check_hypers, py::arg("hypers"), py::arg("group"));
  m.def("num_step_threads", &num_step_threads);
  m.def("has_cuda", &has_cuda);
}

}  // namespace drivetrain::optim
