// Muon's matrices in batches of one shape: their momentum, Newton-Schulz, their step; see muon.h.
#include "optim/muon.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "grad/norm.h"
#include "optim/launch.h"
#include "optim/precision.h"

namespace drivetrain::optim {
namespace {

// Elements of a batch: the iteration has about four copies of it in bfloat16.
constexpr int64_t kBatchElements = 1 << 23;

struct Matrix {
  ParamJob param;
  MuonArgs args;
};

// Matrices with the same may share a batch: their shape as memory has it, and what the iteration depends on.
auto shape_of(const ParamJob& param) {
  return param.is_transposed ? std::pair(param.columns, param.rows) : std::pair(param.rows, param.columns);
}
auto batch_key(const Matrix& matrix) {
  const MuonArgs& args = matrix.args;
  return std::tuple(shape_of(matrix.param), args.coefficients[0], args.coefficients[1], args.coefficients[2],
                    args.iterations, args.eps);
}

// torch.optim.Muon's learning rates: Jordan's, or those of Liu et al. 2025 (section 2.2), which match AdamW's updates.
double adjusted(const MuonArgs& args, const ParamJob& param) {
  const double rows = param.rows, columns = param.columns;
  return args.step_size * (args.matches_rms_adamw != 0 ? 0.2 * std::sqrt(std::max(rows, columns))
                                                       : std::sqrt(std::max(1.0, rows / columns)));
}

// Of each matrix, in bfloat16 as torch has it. On the CPU in our own order, whatever the number of threads.
at::Tensor norms_of(const at::Tensor& matrices) {
  if (!matrices.is_cpu()) return at::linalg_vector_norm(matrices, 2, {1, 2}, /*keepdim=*/true);
  at::Tensor norms = at::empty({matrices.size(0), 1, 1}, at::kFloat);
  const int64_t numel = matrices.size(1) * matrices.size(2);
  for (int64_t i = 0; i < matrices.size(0); ++i) {
    const Stream values = {static_cast<uint16_t*>(matrices.data_ptr()) + i * numel, Format::kBFloat16};
    norms.data_ptr<float>()[i] = static_cast<float>(std::sqrt(grad::sum_of_squares({{values, numel}})));
  }
  return norms.to(at::kBFloat16);
}

// Newton-Schulz with a polynomial of degree 5: towards the nearest orthogonal matrices. matrices: [number, rows,
// columns], bfloat16, written. A tall matrix is multiplied from the right: the smaller of both products with its own
// transpose is what the polynomial is taken of, and nothing is transposed in memory.
at::Tensor orthogonalized(at::Tensor matrices, const MuonArgs& args) {
  const auto [a, b, c] = args.coefficients;
  const bool is_tall = matrices.size(1) > matrices.size(2);
  matrices.div_(norms_of(matrices).clamp_min_(args.eps));
  for (int i = 0; i < static_cast<int>(args.iterations); ++i) {
    const at::Tensor transposed = matrices.transpose(1, 2);
    const at::Tensor gram = is_tall ? at::bmm(transposed, matrices) : at::bmm(matrices, transposed);
    // Without the last product where it is not asked for: with alpha = 0 torch 2.13's baddbmm of bfloat16 matrices of
    // some sizes is wrong on the CPU, by a factor.
    const at::Tensor polynomial = c == 0 ? gram.mul(b) : at::baddbmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    matrices = is_tall ? at::baddbmm(matrices, matrices, polynomial, /*beta=*/a)
                       : at::baddbmm(matrices, polynomial, matrices, /*beta=*/a);
  }
  return matrices.contiguous();
}

// One pass of a rule over the batch; params and rules are of the same order.
void run_pass(c10::Device device, StepJob job, RuleKind kind, std::vector<ParamJob>& params,
              const std::vector<RuleArgs>& rules) {
  job.kind = kind;
  job.total = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].rule = static_cast<int32_t>(i);
    params[i].begin = num_blocks(job.total) * kBlock;  // states may have blocks
    job.total = params[i].begin + params[i].numel;
  }
  job.params = params.data();
  job.num_params = static_cast<int32_t>(params.size());
  job.rules = rules.data();
  job.num_rules = static_cast<int32_t>(rules.size());
  run_step(device, job);
}

void run_batch(c10::Device device, const StepJob& job, const Matrix* matrices, int64_t number) {
  const auto [rows, columns] = shape_of(matrices->param);
  const at::Tensor momenta = at::empty({number, rows, columns}, at::TensorOptions(at::kBFloat16).device(device));
  const auto stream = [&](const at::Tensor& of, int64_t i) {
    return Stream{static_cast<uint16_t*>(of.data_ptr()) + i * rows * columns, Format::kBFloat16};
  };
  std::vector<ParamJob> params;
  std::vector<RuleArgs> rules;
  for (int64_t i = 0; i < number; ++i) {
    params.push_back(matrices[i].param);
    params.back().param = stream(momenta, i);
    rules.push_back(RuleArgs::of(matrices[i].args));
  }
  run_pass(device, job, RuleKind::kMuonMomentum, params, rules);

  const at::Tensor orthogonal = orthogonalized(momenta, matrices->args);

  StepJob step = job;
  step.treatment = {};  // the gradients have had it
  for (int64_t i = 0; i < number; ++i) {
    params[i] = matrices[i].param;
    params[i].grad = stream(orthogonal, i);
    MuonArgs args = matrices[i].args;
    args.step_size = adjusted(args, params[i]);
    rules[i] = RuleArgs::of(args);
  }
  run_pass(device, step, RuleKind::kMuonStep, params, rules);
}

}  // namespace

void run_muon(c10::Device device, const StepJob& job) {
  std::vector<Matrix> matrices;
  for (int32_t i = 0; i < job.num_params; ++i) {
    matrices.push_back({job.params[i], job.rules[job.params[i].rule].as<MuonArgs>()});
  }
  std::stable_sort(matrices.begin(), matrices.end(),
                   [](const Matrix& a, const Matrix& b) { return batch_key(a) < batch_key(b); });
  for (size_t first = 0; first < matrices.size();) {
    const int64_t most = std::max<int64_t>(1, kBatchElements / matrices[first].param.numel);
    size_t last = first + 1;
    while (last < matrices.size() && static_cast<int64_t>(last - first) < most &&
           batch_key(matrices[last]) == batch_key(matrices[first])) {
      ++last;
    }
    run_batch(device, job, &matrices[first], static_cast<int64_t>(last - first));
    first = last;
  }
}

}  // namespace drivetrain::optim
