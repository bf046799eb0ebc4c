// A CUDA step's memory and launches; see run_cuda.h.
#include "optim/run_cuda.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "base/current_stream.h"
#include "grad/norm.h"

namespace drivetrain::optim {
namespace {

at::Tensor empty_on(c10::Device device, int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}

}  // namespace

void place_on_device(Batch& batch) {
  const c10::DeviceGuard guard(batch.device);
  if (batch.rule->kind == RuleKind::kAdafactor) {
    // Made anew in every step: torch's allocator mostly gives the same memory, so that the table stays as it is.
    batch.factoring = factoring_of(batch.params.data(), static_cast<int32_t>(batch.params.size()));
    batch.factors = empty_on(batch.device, batch.factoring.num_doubles * static_cast<int64_t>(sizeof(double)));
    place_factors(batch.factoring, batch.params.data(), static_cast<double*>(batch.factors.data_ptr()));
  }
  const std::vector<Factored>& matrices = batch.factoring.matrices;
  std::vector<char> bytes;
  append_bytes(bytes, batch.params.data(), batch.params.size());
  append_bytes(bytes, batch.starts.data(), batch.starts.size());
  append_bytes(bytes, batch.empty_starts.data(), batch.empty_starts.size());
  append_bytes(bytes, matrices.data(), matrices.size());
  void* const stream = current_stream(batch.device);
  char* table = batch.table.hold(bytes, batch.device, stream);
  batch.placed.params = reinterpret_cast<ParamJob*>(table);
  table += batch.params.size() * sizeof(ParamJob);
  batch.placed.starts = reinterpret_cast<const ParamStart*>(table);
  table += (batch.starts.size() + batch.empty_starts.size()) * sizeof(ParamStart);
  batch.placed.matrices = reinterpret_cast<const Factored*>(table);
  bytes.clear();
  append_bytes(bytes, batch.numbers.data(), batch.numbers.size());
  batch.placed.numbers = reinterpret_cast<const GroupNumbers*>(batch.numbers_table.hold(bytes, batch.device, stream));
}

at::Tensor treat_on_device(const std::vector<const Batch*>& batches, const TreatmentAsked& asked,
                           const TreatmentScalars& scalars) {
  const c10::Device device = batches.front()->device;
  const c10::DeviceGuard guard(device);
  void* const stream = current_stream(device);
  int64_t num_chunks = 0;
  if (asked.measures) {
    for (const Batch* batch : batches) num_chunks += batch->num_chunks;
  }
  const at::Tensor sums = empty_on(device, num_chunks * static_cast<int64_t>(sizeof(double)));
  const at::Tensor treatment = empty_on(device, sizeof(GradTreatment));
  auto* const all = static_cast<double*>(sums.data_ptr());
  if (asked.measures) {
    double* of_batch = all;
    for (const Batch* batch : batches) {
      grad::chunk_sums_cuda(batch->placed.params, static_cast<int32_t>(batch->params.size()), batch->num_chunks,
                            of_batch, stream);
      of_batch += batch->num_chunks;
    }
  }
  treat_cuda(asked, scalars, all, num_chunks, static_cast<GradTreatment*>(treatment.data_ptr()), stream);
  return treatment;
}

void run_on_device(Batch& batch, StepJob job) {
  const c10::DeviceGuard guard(batch.device);
  void* const stream = current_stream(batch.device);
  const at::Tensor rules = empty_on(batch.device, job.num_params * static_cast<int64_t>(sizeof(RuleArgs)));
  job.params = batch.placed.params;
  job.rules = static_cast<const RuleArgs*>(rules.data_ptr());
  job.num_rules = job.num_params;
  start_cuda({job.kind, batch.placed.params, batch.placed.starts, batch.placed.numbers,
              static_cast<RuleArgs*>(rules.data_ptr()), job.num_params,
              static_cast<int32_t>(batch.starts.size() + batch.empty_starts.size()), job.treatment_on_device},
             stream);
  const Factoring& factoring = batch.factoring;
  factor_cuda(job, batch.placed.matrices, static_cast<int32_t>(factoring.matrices.size()), factoring.num_units,
              factoring.num_blocks, stream);
  at::Tensor sums;
  if (batch.rule->adapt != nullptr) {
    sums = empty_on(batch.device, batch.num_chunks * static_cast<int64_t>(sizeof(LayerSums)));
    adapt_cuda(job, batch.num_chunks, static_cast<LayerSums*>(sums.data_ptr()),
               static_cast<RuleArgs*>(rules.data_ptr()), stream);
  }
  step_cuda(job, stream);
  batch.factors.reset();
}

}  // namespace drivetrain::optim
