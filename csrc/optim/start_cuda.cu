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
__device__ void make_rule(const StepStart& step, int64_t i, const Hypers& hypers, double number,
                          const Scalars& scalars) {
  using Args = typename RuleOf<float>::Args;
  const ParamJob& param = step.params[i];
  Args args = make_args<Args>(hypers, number, scalars);
  if constexpr (requires { args.fit(param.rows, param.columns); }) {
    if (param.rows > 0) args.fit(param.rows, param.columns);
  }
  if constexpr (kHasKernels<kKind>) {
    if (step.records != nullptr && step.starts[i].other < 0) {
      const GradScaling* const on_device = step.grad_scaling;
      step.records[i] = record_of(param, rule_from<RuleOf<float>>(args),
                                  on_device != nullptr ? *on_device : step.grad_scaling_of_host);
      return;
    }
  }
  step.rules[i] = RuleArgs::of(args);
}

// `number` counts the optimizer's steps, this one included.
__device__ void make_rule(const StepStart& step, int64_t i, const Hypers& hypers, double number,
                          const Scalars& scalars) {
  switch (step.kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return make_rule<Rule, RuleKind::k##Rule>(step, i, hypers, number, scalars);
    DT_OPTIM_RULES(DT_CASE)
    DT_TRUST_RATIO_RULES(DT_CASE)
#undef DT_CASE
    default:  // the reader has rejected it
      return;
  }
}

template <class Args>
__device__ void advance(const Hypers& hypers, double number, Scalars& scalars) {
  if constexpr (kHasScalars<Args>) Args::advance(hypers, number, scalars);
}

__device__ void advance(RuleKind kind, const Hypers& hypers, double number, Scalars& scalars) {
  switch (kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return advance<typename Rule<float>::Args>(hypers, number, scalars);
    DT_OPTIM_RULES(DT_CASE)
    DT_TRUST_RATIO_RULES(DT_CASE)
#undef DT_CASE
    default:
      return;
  }
}

__device__ double load_number(const void* number, bool is_double) {
  return is_double ? *static_cast<const double*>(number) : *static_cast<const float*>(number);
}

__device__ void store_number(void* number, bool is_double, double value) {
  if (is_double) {
    *static_cast<double*>(number) = value;
  } else {
    *static_cast<float*>(number) = static_cast<float>(value);
  }
}

__device__ Scalars scalars_of(const ParamStart& start) {
  Scalars scalars = {};
#pragma unroll
  for (int s = 0; s < kMaxScalars; ++s) {
    scalars.is_double[s] = start.scalars_are_double[s];
    if (start.scalars[s] != nullptr) scalars.value[s] = load_number(start.scalars[s], start.scalars_are_double[s]);
  }
  return scalars;
}

__global__ void __launch_bounds__(kStartThreads) start_step(StepStart step) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kStartThreads + threadIdx.x;
  if (i >= step.num_starts) return;
  const ParamStart start = step.starts[i];
  const GroupNumbers& numbers = step.numbers[start.numbers];
  const double counted = start.counter == nullptr ? 0 : load_number(start.counter, start.counter_is_double);
  const double number = (start.counts_steps ? counted : start.steps_done) + 1;
  Hypers hypers = numbers.hypers;
  if (numbers.lr != nullptr) hypers.lr = load_number(numbers.lr, numbers.lr_is_double);
  Scalars scalars = scalars_of(start);
  if (i < step.num_params) {
    make_rule(step, i, hypers, number, scalars);
    ParamJob& param = step.others == nullptr || start.other < 0 ? step.params[i] : step.others[start.other];
    param.key = random_key(start.seed, counted);
  }
  if (start.counter == nullptr || (step.grad_scaling != nullptr && step.grad_scaling->skips)) return;
  store_number(start.counter, start.counter_is_double, counted + 1);
  if (start.scalars[0] == nullptr) return;
  advance(step.kind, hypers, number, scalars);
#pragma unroll
  for (int s = 0; s < kMaxScalars; ++s) {
    if (start.scalars[s] != nullptr) store_number(start.scalars[s], start.scalars_are_double[s], scalars.value[s]);
  }
}

}  // namespace

void start_cuda(const StepStart& start, void* stream) {
  if (start.num_starts == 0) return;
  launch_cuda("launching the start of the optimizer step", start_step,
              (start.num_starts + kStartThreads - 1) / kStartThreads, kStartThreads, stream, start);
}

}  // namespace drivetrain::optim
