// Sums norms for trust ratios on CUDA and adapts the rules; see trust_ratio.h. Includes no torch header.
//
// The sums' pass reads the step's inputs and writes 16 bytes per chunk of 4,096 elements. For LAMB in float32 it moves
// 16 bytes per element and the step 28; for Adafactor 8 and 12, as in adafactor_cuda.cu. A warp takes a chunk row by
// row and issues a row's loads at once: 128 bytes per thread of LAMB in float32.
#include "base/block_cuda.cuh"
#include "base/launch_cuda.h"
#include "formats/summation_cuda.cuh"
#include "optim/cuda_step.h"
#include "optim/rule_row_cuda.cuh"

namespace drivetrain::optim {
namespace {

using formats::kChunk;
using formats::kLanes;

template <template <class> class RuleOf, class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == sizeof(float) ? 2 : 1)
    trust_ratio_sums(StepJob job, int64_t num_chunks, TrustRatioSums* sums) {
  using Rule = RuleOf<T>;
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (chunk >= num_chunks || skips_step(job)) return;
  const T factor = T(factor_of_gradients(job));
  const ParamJob param =
      job.params[formats::last_from_in_warp(job.params, job.num_params, &ParamJob::first_chunk, chunk)];
  const Rule rule = rule_from<Rule>(load_args<typename Rule::Args>(job.rules[param.rule]));
  const int64_t begin = (chunk - param.first_chunk) * kChunk;
  const int64_t end = param.numel < begin + kChunk ? param.numel : begin + kChunk;
  const bool is_wide = RuleRow<Rule, T>::is_wide(param);
  double of_param[kQuad] = {}, of_direction[kQuad] = {};
#pragma unroll 1
  for (int64_t base = begin; base < end; base += kRow) {
    RuleRow<Rule, T> row;
    row.load(param, is_wide, base, end);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      T value[kQuad], grad[kQuad], state[RuleRow<Rule, T>::kStates][kQuad];
      row.get(param, q, value, grad, state);
      T direction[kQuad];
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        T own[kMaxStates];
#pragma unroll
        for (int s = 0; s < Rule::kNumStates; ++s) own[s] = state[s][k];
        direction[k] = rule.direction(value[k], factor * grad[k], own);
        if (base + quad_position(q) + k >= end) direction[k] = T(0);
      }
      formats::add_squares(value, of_param);
      formats::add_squares(direction, of_direction);
    }
  }
  const TrustRatioSums own = {formats::sum_of_slots(of_param), formats::sum_of_slots(of_direction)};
  if (formats::lane_of_thread() == 0) sums[chunk] = own;
}

// Each block takes one parameter.
template <template <class> class RuleOf>
__global__ void __launch_bounds__(kThreads) adapt_rules(StepJob job, const TrustRatioSums* sums, RuleArgs* rules) {
  using Args = typename RuleOf<float>::Args;
  if (skips_step(job)) return;
  const ParamJob& param = job.params[blockIdx.x];
  const TrustRatioSums* own = sums + param.first_chunk;
  const int64_t count = (param.numel + kChunk - 1) / kChunk;
  TrustRatioSums total;
  total.param = formats::sum_in_groups<kThreads>(count, [=](int64_t chunk) { return own[chunk].param; });
  total.direction = formats::sum_in_groups<kThreads>(count, [=](int64_t chunk) { return own[chunk].direction; });
  if (threadIdx.x != 0) return;
  Args args = load_args<Args>(rules[blockIdx.x]);
  args.adapt(total, param.numel);
  rules[blockIdx.x] = RuleArgs::of(args);
}

template <template <class> class RuleOf>
void adapt(const StepJob& job, int64_t num_chunks, TrustRatioSums* sums, RuleArgs* rules, void* stream) {
  const auto read = job.in_double ? trust_ratio_sums<RuleOf, double> : trust_ratio_sums<RuleOf, float>;
  launch_cuda("launching the norms of parameters", read, (num_chunks + kWarps - 1) / kWarps, kThreads, stream, job,
              num_chunks, sums);
  launch_cuda("launching what norms make of a step", adapt_rules<RuleOf>, job.num_params, kThreads, stream, job, sums,
              rules);
}

}  // namespace

void adapt_cuda(const StepJob& job, int64_t num_chunks, TrustRatioSums* sums, RuleArgs* rules, void* stream) {
  if (num_chunks == 0) return;
  switch (job.kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return adapt<Rule>(job, num_chunks, sums, rules, stream);
    DT_TRUST_RATIO_RULES(DT_CASE)
#undef DT_CASE
    default:  // No other rule has a trust ratio.
      return;
  }
}

}  // namespace drivetrain::optim
