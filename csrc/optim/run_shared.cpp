// Exposes the sums of a step's passes as tensors, to be shared with other ranks; see run_shared.h.
#include "optim/run_shared.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "formats/summation.h"
#include "optim/adafactor.h"
#include "optim/run_cuda.h"
#include "optim/trust_ratio.h"

namespace drivetrain::optim {
namespace {

at::Tensor over(void* data, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  const auto options = at::TensorOptions(dtype).device(device);
  return at::from_blob(data, sizes, [](void*) {}, options, device);
}

// Sums chunks in the order of summation.h; a parameter's total replaces its first chunk's sum.
void share_chunks(const Batch& batch, TrustRatioSums* sums, const std::function<void(const at::Tensor&)>& share) {
  const at::Tensor chunks = over(sums, {batch.num_chunks, 2}, at::kDouble, batch.device);
  const at::Tensor totals = at::empty({static_cast<int64_t>(batch.params.size()), 2}, chunks.options());
  for (size_t i = 0; i < batch.params.size(); ++i) {
    const ParamJob& param = batch.params[i];
    totals.select(0, static_cast<int64_t>(i))
        .copy_(chunks.narrow(0, param.first_chunk, formats::num_chunks(param.numel)).sum(0));
  }
  share(totals);
  chunks.zero_();
  for (size_t i = 0; i < batch.params.size(); ++i) {
    chunks.select(0, batch.params[i].first_chunk).copy_(totals.select(0, static_cast<int64_t>(i)));
  }
}

}  // namespace

void run_shared(Batch& batch, const std::vector<Written>& written, const StepJob& job, const Share& share) {
  const bool is_factored = batch.rule->kind == RuleKind::kAdafactor;
  if (is_factored && batch.device.is_cpu()) {
    batch.factoring = factoring_of(batch.params.data(), job.num_params);
    batch.factors = at::empty({batch.factoring.num_doubles}, at::kDouble);
    place_factors(batch.factoring, batch.params.data(), static_cast<double*>(batch.factors.data_ptr()));
  }
  std::vector<at::Tensor> params, matrices;
  for (uint32_t index : batch.written_of) {
    params.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(written[index].param));
  }
  const std::vector<Factored>& factored = batch.factoring.matrices;
  for (const Factored& of : factored) matrices.push_back(params[of.param]);

  Between between;
  between.factor_sums = [&] {
    std::vector<at::Tensor> sums;
    for (const Factored& of : factored) {
      sums.push_back(over(of.row_sums, {num_column_units(of), of.matrices, of.rows}, at::kDouble, batch.device));
      sums.push_back(over(of.column_sums, {num_row_units(of), of.matrices, of.columns}, at::kDouble, batch.device));
    }
    share("factor_sums", batch.in_double, matrices, sums);
  };
  between.row_factors = [&] {
    std::vector<at::Tensor> factors;
    for (const Factored& of : factored) {
      factors.push_back(over(batch.params[of.param].state[0].data, {of.matrices, of.rows},
                             batch.in_double ? at::kDouble : at::kFloat, batch.device));
    }
    share("row_factors", batch.in_double, matrices, factors);
  };
  const auto share_norms = [&](const at::Tensor& sums) { share("norms", batch.in_double, params, {sums}); };
  between.norms = [&](TrustRatioSums* sums) {
    if (batch.device.is_cuda()) {
      share_chunks(batch, sums, share_norms);
    } else {
      share_norms(over(sums, {job.num_params, 2}, at::kDouble, batch.device));
    }
  };

  if (batch.device.is_cuda() && batch.total > 0) {
    run_on_device(batch, job, &between);
  } else if (batch.total > 0 && is_factored) {
    run_shared_adafactor(job, batch.factoring, batch.rule->adapt, between);
  } else if (batch.total > 0) {
    run_shared_trust_ratio(job, batch.rule->adapt, between);
  } else {
    if (is_factored) between.factor_sums();
    if (is_factored) between.row_factors();
    share_norms(at::empty({0, 2}, at::TensorOptions(at::kDouble).device(batch.device)));
  }
  batch.factors.reset();
}

}  // namespace drivetrain::optim
