// Allocates a CUDA step's memory and launches its kernels; see run_cuda.h.
#include "optim/run_cuda.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "base/current_stream.h"
#include "formats/storage_torch.h"
#include "formats/summation.h"

namespace drivetrain::optim {
namespace {

at::Tensor empty_on(c10::Device device, int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}

}  // namespace

void place_on_device(Batch& batch) {
  const c10::DeviceGuard guard(batch.device);
  void* const stream = current_stream(batch.device);
  std::vector<char> bytes;
  append_bytes(bytes, batch.numbers.data(), batch.numbers.size());
  batch.placed.numbers = reinterpret_cast<const GroupNumbers*>(batch.numbers_table.hold(bytes, batch.device, stream));
  bytes.clear();
  const auto has_blocks = [&] { return batch.plan.blocks.empty() || batch.blocks_table.is_held_for(stream); };
  // These place memory of the step in the table.
  const bool uses_memory = batch.rule->kind == RuleKind::kAdafactor || batch.rule->kind == RuleKind::kMuonMomentum;
  if (!uses_memory && batch.table.is_held_for(stream) && has_blocks() && batch.params.is_placed() &&
      batch.starts.is_placed() && batch.empty_starts.is_placed()) {
    return;
  }
  // Temporary device memory is allocated in every step. torch's allocator mostly returns the same memory, so that the
  // table stays equal.
  std::vector<ParamStart> starts(batch.starts.begin(), batch.starts.end());
  if (batch.rule->kind == RuleKind::kAdafactor) {
    batch.factoring = factoring_of(batch.params.data(), static_cast<int32_t>(batch.params.size()));
    batch.factors = empty_on(batch.device, batch.factoring.num_doubles * static_cast<int64_t>(sizeof(double)));
    place_factors(batch.factoring, batch.params.data(), static_cast<double*>(batch.factors.data_ptr()));
  }
  if (batch.rule->kind == RuleKind::kMuonMomentum) {
    starts.clear();
    for (int32_t i : batch.muon.order) starts.push_back(batch.starts[i]);
  }
  if (!is_plan_of(batch.plan, batch.params.data(), batch.params.size()) || !has_blocks()) {
    StepPlan plan =
        plan_step(batch.rule->kind, batch.in_double, batch.params.data(), static_cast<int32_t>(batch.params.size()));
    append_bytes(bytes, plan.blocks.data(), plan.blocks.size());
    if (!bytes.empty()) {
      batch.placed.blocks = reinterpret_cast<const StepBlock*>(batch.blocks_table.hold(bytes, batch.device, stream));
    }
    bytes.clear();
    batch.plan = std::move(plan);
    if (!has_blocks()) batch.plan.planned.clear();  // A captured step's blocks end with its graph.
  } else if (!batch.plan.blocks.empty()) {
    batch.placed.blocks = reinterpret_cast<const StepBlock*>(batch.blocks_table.data());
  }
  std::vector<ParamJob> others;
  batch.total_of_others = 0;
  for (const int32_t i : batch.plan.others) {
    starts[i].other = static_cast<int32_t>(others.size());
    ParamJob& other = others.emplace_back(batch.params[i]);
    other.begin = num_blocks(batch.total_of_others) * kBlock;
    batch.total_of_others = other.begin + other.numel;
  }
  starts.insert(starts.end(), batch.empty_starts.begin(), batch.empty_starts.end());
  const auto append = [&bytes](const auto& table) {
    constexpr size_t kAlignment = 16;  // alignment of 16-byte loads
    bytes.resize((bytes.size() + kAlignment - 1) / kAlignment * kAlignment);
    const size_t begin = bytes.size();
    append_bytes(bytes, table.data(), table.size());
    return begin;
  };
  const size_t params_begin = append(batch.params), starts_begin = append(starts);
  const size_t factored_begin = append(batch.factoring.matrices);
  const size_t momenta_begin = append(batch.muon.momenta), steps_begin = append(batch.muon.steps);
  const size_t others_begin = append(others);
  char* const table = batch.table.hold(bytes, batch.device, stream);
  batch.placed.params = reinterpret_cast<ParamJob*>(table + params_begin);
  batch.placed.starts = reinterpret_cast<const ParamStart*>(table + starts_begin);
  batch.placed.factored = reinterpret_cast<const Factored*>(table + factored_begin);
  batch.placed.momenta = reinterpret_cast<const ParamJob*>(table + momenta_begin);
  batch.placed.steps = reinterpret_cast<ParamJob*>(table + steps_begin);
  batch.placed.others = reinterpret_cast<ParamJob*>(table + others_begin);
  const bool is_kept = batch.table.is_held_for(stream);  // A captured graph's table may end with it.
  batch.params.set_placed(is_kept);
  batch.starts.set_placed(is_kept);
  batch.empty_starts.set_placed(is_kept);
}

at::Tensor compute_grad_scaling_on_device(const std::vector<Batch*>& batches, const GradScalingOptions& asked,
                                          const GradScalingScalars& scalars,
                                          const std::optional<at::Tensor>& sum_of_squares) {
  const c10::Device device = batches.front()->device;
  const c10::DeviceGuard guard(device);
  void* const stream = current_stream(device);
  const bool sums_here = asked.measures && !sum_of_squares;
  int64_t num_chunks = sum_of_squares ? sum_of_squares->numel() : 0;
  if (sums_here) {
    for (const Batch* batch : batches) num_chunks += batch->num_chunks;
  }
  const at::Tensor sums =
      sum_of_squares ? *sum_of_squares : empty_on(device, num_chunks * static_cast<int64_t>(sizeof(double)));
  const at::Tensor grad_scaling = empty_on(device, sizeof(GradScaling));
  auto* const all = static_cast<double*>(sums.data_ptr());
  if (sums_here) {
    double* of_batch = all;
    for (const Batch* batch : batches) {
      chunk_sums_cuda(batch->placed.params, static_cast<int32_t>(batch->params.size()), batch->num_chunks, of_batch,
                      stream);
      of_batch += batch->num_chunks;
    }
  }
  compute_grad_scaling_cuda(asked, scalars, all, num_chunks, static_cast<GradScaling*>(grad_scaling.data_ptr()),
                            stream);
  return grad_scaling;
}

at::Tensor chunk_sums_on_device(const at::Tensor& values) {
  const c10::DeviceGuard guard(values.device());
  const int64_t numel = formats::real_numel(values);
  const at::Tensor sums = at::empty({formats::num_chunks(numel)}, values.options().dtype(at::kDouble));
  chunk_sums_cuda(formats::array_of(values), numel, sums.data_ptr<double>(), current_stream(values.device()));
  return sums;
}

void run_on_device(Batch& batch, StepJob job) {
  const c10::DeviceGuard guard(batch.device);
  void* const stream = current_stream(batch.device);
  const bool is_muon = job.kind == RuleKind::kMuonMomentum;
  const bool is_planned = !batch.plan.launches.empty() && job.statistics == nullptr;  // those kernels do not measure
  const auto num_others = static_cast<int32_t>(batch.plan.others.size());
  at::Tensor rules, specialized;
  if (!is_planned || num_others > 0) {
    rules = empty_on(batch.device, job.num_params * static_cast<int64_t>(sizeof(RuleArgs)));
  }
  if (is_planned) specialized = empty_on(batch.device, job.num_params * static_cast<int64_t>(sizeof(StepRecord)));
  auto* const of_params = rules.defined() ? static_cast<RuleArgs*>(rules.data_ptr()) : nullptr;
  auto* const records = is_planned ? static_cast<StepRecord*>(specialized.data_ptr()) : nullptr;
  job.params = batch.placed.params;
  job.rules = of_params;
  job.num_rules = job.num_params;
  start_cuda({job.kind, is_muon ? batch.placed.steps : batch.placed.params, batch.placed.starts, batch.placed.numbers,
              of_params, job.num_params, static_cast<int32_t>(batch.starts.size() + batch.empty_starts.size()),
              job.grad_scaling_on_device, records, is_planned ? batch.placed.others : nullptr, job.grad_scaling},
             stream);
  if (is_planned) {
    for (const StepLaunch& launch : batch.plan.launches) {
      step_kernel_cuda(launch, records, batch.placed.blocks, stream);
    }
    if (num_others == 0) return;
    job.params = batch.placed.others;
    job.num_params = num_others;
    job.total = batch.total_of_others;
    return step_cuda(job, stream);
  }
  if (is_muon) {
    run_muon(batch.muon, job, batch.placed.momenta, batch.placed.steps,
             [stream](const StepJob& pass) { step_cuda(pass, stream); });
    batch.muon = {};
    return;
  }
  const Factoring& factoring = batch.factoring;
  factor_cuda(job, batch.placed.factored, static_cast<int32_t>(factoring.matrices.size()), factoring.num_units,
              factoring.num_blocks, stream);
  at::Tensor sums;
  if (batch.rule->adapt != nullptr) {
    sums = empty_on(batch.device, batch.num_chunks * static_cast<int64_t>(sizeof(TrustRatioSums)));
    adapt_cuda(job, batch.num_chunks, static_cast<TrustRatioSums*>(sums.data_ptr()), of_params, stream);
  }
  step_cuda(job, stream);
  batch.factors.reset();
}

}  // namespace drivetrain::optim
