// Runs Muon's matrices in batches of one shape: momentum, Newton-Schulz, step; see muon.h.
#include "optim/muon.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <utility>

#include "grad/norm.h"
#include "optim/launch.h"
#include "optim/precision.h"

namespace drivetrain::optim {
namespace {

// Elements of a batch: the iteration keeps about four copies of it in bfloat16.
constexpr int64_t kBatchElements = 1 << 23;

// Returns the key of matrices that may share a batch: their shape in memory, and the iteration's arguments.
auto shape_of(const ParamJob& param) {
  return param.is_transposed ? std::pair(param.columns, param.rows) : std::pair(param.rows, param.columns);
}
auto batch_key(const ParamJob& param, const MuonArgs& args) {
  return std::tuple(shape_of(param), args.coefficients[0], args.coefficients[1], args.coefficients[2], args.iterations,
                    args.eps);
}

// Returns each matrix's norm, in bfloat16 as in torch. On the CPU the order of the sum does not depend on the number of
// threads.
at::Tensor norms_of(const at::Tensor& matrices) {
  if (!matrices.is_cpu()) return at::linalg_vector_norm(matrices, 2, {1, 2}, /*keepdim=*/true);
  at::Tensor norms = at::empty({matrices.size(0), 1, 1}, at::kFloat);
  const int64_t numel = matrices.size(1) * matrices.size(2);
  for (int64_t i = 0; i < matrices.size(0); ++i) {
    const TypedArray values = {static_cast<uint16_t*>(matrices.data_ptr()) + i * numel, Format::kBFloat16};
    norms.data_ptr<float>()[i] = static_cast<float>(std::sqrt(grad::sum_of_squares({{values, numel}})));
  }
  return norms.to(at::kBFloat16);
}

// Returns the dtype of matrix products. Where oneDNN multiplies no bfloat16 matrices on the CPU, torch's own loop takes
// 30 times as long as a product in float32. Rounded to bfloat16, both are sums in float32 and differ in few last bits.
at::ScalarType product_dtype(const at::Tensor& matrices) {
  if (!matrices.is_cpu()) return at::kBFloat16;
  static const bool has_bfloat16 = [] {
    const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return found && found->typed<bool()>().call();
  }();
  return has_bfloat16 ? at::kBFloat16 : at::kFloat;
}

// Runs a Newton-Schulz iteration with a polynomial of degree 5, which converges to the nearest orthogonal matrices.
// Both tensors are bfloat16 [number, rows, columns]. Every iteration reads one and writes the other, the first one
// `other`. A tall matrix is multiplied from the right. The polynomial's argument is then the smaller product with its
// own transpose, and nothing is transposed in memory.
void orthogonalize(at::Tensor matrices, at::Tensor other, const MuonArgs& args) {
  const auto [a, b, c] = args.coefficients;
  const bool is_tall = matrices.size(1) > matrices.size(2);
  const at::ScalarType dtype = product_dtype(matrices);
  matrices.div_(norms_of(matrices).clamp_min_(args.eps));
  for (int i = 0; i < static_cast<int>(args.iterations); ++i) {
    const at::Tensor factor = matrices.to(dtype), transposed = factor.transpose(1, 2);
    const at::Tensor product = is_tall ? at::bmm(transposed, factor) : at::bmm(factor, transposed);
    const at::Tensor gram = product.to(at::kBFloat16).to(dtype);
    // Skip the last product if c is 0. With alpha = 0 on the CPU, torch 2.13's baddbmm of bfloat16 matrices of some
    // sizes is wrong by a factor.
    const at::Tensor sum = c == 0 ? gram.mul(b) : at::baddbmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    const at::Tensor polynomial = sum.to(at::kBFloat16).to(dtype);
    const at::Tensor &left = is_tall ? factor : polynomial, &right = is_tall ? polynomial : factor;
    if (dtype == at::kBFloat16) {
      at::baddbmm_out(other, factor, left, right, /*beta=*/a);
    } else {
      other.copy_(at::baddbmm(factor, left, right, /*beta=*/a));
    }
    std::swap(matrices, other);
  }
}

int last_of(const MuonArgs& args) { return static_cast<int>(args.iterations) % 2; }

TypedArray matrix_in(const at::Tensor& memory, int64_t index, int64_t numel) {
  return {static_cast<uint16_t*>(memory.data_ptr()) + index * numel, Format::kBFloat16};
}

}  // namespace

MuonPlan plan_muon(c10::Device device, const ParamJob* params, const std::vector<MuonArgs>& args) {
  MuonPlan plan;
  plan.order.resize(args.size());
  std::iota(plan.order.begin(), plan.order.end(), 0);
  const auto key = [&](size_t i) { return batch_key(params[plan.order[i]], args[plan.order[i]]); };
  std::stable_sort(plan.order.begin(), plan.order.end(),
                   [&](int32_t a, int32_t b) { return batch_key(params[a], args[a]) < batch_key(params[b], args[b]); });
  int64_t largest = 0;
  for (size_t first = 0, last = 0; first < plan.order.size(); first = last) {
    const ParamJob& param = params[plan.order[first]];
    const int64_t most = std::max<int64_t>(1, kBatchElements / param.numel);
    while (last < plan.order.size() && static_cast<int64_t>(last - first) < most && key(last) == key(first)) ++last;
    const auto [rows, columns] = shape_of(param);
    const auto number = static_cast<int32_t>(last - first);
    plan.batches.push_back({static_cast<int32_t>(first), number, rows, columns, 0, args[plan.order[first]]});
    largest = std::max(largest, number * param.numel);
  }
  for (at::Tensor& memory : plan.memory) {
    memory = at::empty({largest}, at::TensorOptions(at::kBFloat16).device(device));
  }
  for (MuonBatch& batch : plan.batches) {
    for (int32_t i = 0; i < batch.number; ++i) {
      ParamJob job = params[plan.order[batch.first + i]];
      job.rule = batch.first + i;
      job.begin = num_blocks(batch.total) * kBlock;  // States may have blocks.
      batch.total = job.begin + job.numel;
      plan.momenta.push_back(job);
      plan.momenta.back().param = matrix_in(plan.memory[0], i, job.numel);
      plan.steps.push_back(job);
      plan.steps.back().grad = matrix_in(plan.memory[last_of(batch.args)], i, job.numel);
    }
  }
  return plan;
}

void run_muon(const MuonPlan& plan, const StepJob& job, const ParamJob* momenta, const ParamJob* steps,
              const std::function<void(const StepJob&)>& run) {
  for (const MuonBatch& batch : plan.batches) {
    StepJob pass = job;
    pass.num_params = batch.number;
    pass.total = batch.total;
    pass.kind = RuleKind::kMuonMomentum;
    pass.params = momenta + batch.first;
    run(pass);
    const auto matrices = [&](const at::Tensor& memory) {
      return memory.narrow(0, 0, batch.number * batch.rows * batch.columns)
          .view({batch.number, batch.rows, batch.columns});
    };
    orthogonalize(matrices(plan.memory[0]), matrices(plan.memory[1]), batch.args);
    pass.kind = RuleKind::kMuonStep;
    pass.params = steps + batch.first;
    pass.grad_scaling = {};  // The first pass has scaled the gradients.
    pass.only_skips = true;
    run(pass);
  }
}

void run_muon_cpu(const StepJob& shared) {
  std::vector<MuonArgs> args;
  for (int32_t i = 0; i < shared.num_params; ++i) {
    args.push_back(shared.rules[shared.params[i].rule].as<MuonArgs>());
  }
  const MuonPlan plan = plan_muon(at::kCPU, shared.params, args);
  std::vector<RuleArgs> rules;
  for (int32_t i : plan.order) {
    args[i].fit(shared.params[i].rows, shared.params[i].columns);
    rules.push_back(RuleArgs::of(args[i]));
  }
  StepJob job = shared;
  job.rules = rules.data();
  job.num_rules = static_cast<int32_t>(rules.size());
  run_muon(plan, job, plan.momenta.data(), plan.steps.data(),
           [](const StepJob& pass) { run_step_cpu(pass, 0, pass.total); });
}

}  // namespace drivetrain::optim
