// Starts a step on CUDA: computes every parameter's RuleArgs and increments the step counters. Includes no torch
// header.
#include "base/launch_cuda.h"
#include "optim/cuda_step.h"

namespace drivetrain::optim {
namespace {

constexpr int kStartThreads = 128;

template <RuleKind kKind>
constexpr bool kHasKernels =
#define DT_ROW(Rule, ...) kKind == RuleKind::k##Rule ||
    DT_STEP_KERNELS(DT_ROW) false;
#undef DT_ROW

template <template <class> class RuleOf, RuleKind kKind>
__device__ void make_rule(const StepStart& step, int64_t i, const Hypers& hypers, double number) {
  using Args = typename RuleOf<float>::Args;
  const ParamJob& param = step.params[i];
  Args args = Args::make(hypers, number);
  if constexpr (requires { args.fit(param.rows, param.columns); }) {
    if (param.rows > 0) args.fit(param.rows, param.columns);
  }
  if constexpr (kHasKernels<kKind>) {
    if (step.records != nullptr) {
      step.records[i] = record_of(param, RuleOf<float>(args));
      return;
    }
  }
  step.rules[i] = RuleArgs::of(args);
}

// `number` is the number of the step.
__device__ void make_rule(const StepStart& step, int64_t i, const Hypers& hypers, double number) {
  switch (step.kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return make_rule<Rule, RuleKind::k##Rule>(step, i, hypers, number);
    DT_OPTIM_RULES(DT_CASE)
    DT_TRUST_RATIO_RULES(DT_CASE)
#undef DT_CASE
    default:  // the reader has rejected it
      return;
  }
}

__global__ void __launch_bounds__(kStartThreads) start_step(StepStart step) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kStartThreads + threadIdx.x;
  if (i >= step.num_starts) return;
  const ParamStart start = step.starts[i];
  const GroupNumbers& numbers = step.numbers[start.numbers];
  double steps_done = 0;
  if (start.counter != nullptr) {
    steps_done = start.counter_is_double ? *static_cast<double*>(start.counter) : *static_cast<float*>(start.counter);
  }
  if (i < step.num_params) {
    Hypers hypers = numbers.hypers;
    if (numbers.lr != nullptr) {
      hypers.lr =
          numbers.lr_is_double ? *static_cast<const double*>(numbers.lr) : *static_cast<const float*>(numbers.lr);
    }
    const double done = start.counts_steps ? steps_done : start.steps_done;
    make_rule(step, i, hypers, done + 1);
    step.params[i].key = random_key(start.seed, steps_done);
  }
  if (start.counter == nullptr || (step.grad_scaling != nullptr && step.grad_scaling->skips)) return;
  if (start.counter_is_double) {
    *static_cast<double*>(start.counter) += 1;
  } else {
    *static_cast<float*>(start.counter) += 1;
  }
}

}  // namespace

void start_cuda(const StepStart& start, void* stream) {
  if (start.num_starts == 0) return;
  launch_cuda("launching the start of the optimizer step", start_step,
              (start.num_starts + kStartThreads - 1) / kStartThreads, kStartThreads, stream, start);
}

}  // namespace drivetrain::optim
