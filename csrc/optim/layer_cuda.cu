// Steps whose length depends on norms over a whole parameter, on CUDA: the sums and what they make of a rule. See
// layer.h. Includes no torch header.
#include <algorithm>

#include "base/launch_cuda.h"
#include "grad/lanes_cuda.cuh"
#include "optim/cuda_step.h"
#include "optim/loop_cuda.cuh"

namespace drivetrain::optim {
namespace {

using grad::kChunk;
using grad::kLanes;

constexpr int64_t kMaxBlocks = 1 << 14;  // fills any GPU; more chunks or parameters loop

// A block takes a chunk, tile by tile: all threads load it as the step itself does, the first two warps add up its
// squares in the order of lanes.h, one the parameter's and one the direction's.
template <template <class> class RuleOf, class T>
__global__ void __launch_bounds__(kThreads) layer_sums(StepJob job, int64_t num_chunks, LayerSums* sums) {
  using Rule = RuleOf<T>;
  __shared__ double squares[2][kTileCuda];
  const GradTreatment treatment = treatment_of_job(job);
  if (treatment.skips) return;
  const T factor = T(treatment.factor);
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  for (int64_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const ParamJob param = job.params[last_from(job.params, job.num_params, &ParamJob::first_chunk, chunk)];
    const Rule rule(job.rules[param.rule].template as<typename Rule::Args>());
    const int64_t begin = (chunk - param.first_chunk) * kChunk;
    const int64_t end = param.numel < begin + kChunk ? param.numel : begin + kChunk;
    double sum = 0;
    for (int64_t base = begin; base < end; base += kTileCuda) {
      T value[kElementsPerThread] = {}, grad[kElementsPerThread] = {}, state[kMaxStates][kElementsPerThread] = {};
      load_tile<Rule>(param, base, end, value, grad, state);
#pragma unroll
      for (int k = 0; k < kElementsPerThread; ++k) {
        T own[kMaxStates];
#pragma unroll
        for (int s = 0; s < Rule::kNumStates; ++s) own[s] = state[s][k];
        const int in_tile = k * kThreads + static_cast<int>(threadIdx.x);
        const bool is_there = base + in_tile < end;
        const double of_param = value[k], of_direction = rule.direction(value[k], factor * grad[k], own);
        squares[0][in_tile] = is_there ? of_param * of_param : 0.0;
        squares[1][in_tile] = is_there ? of_direction * of_direction : 0.0;
      }
      __syncthreads();
      if (warp < 2) {
        for (int i = grad::lane_of_thread(); i < kTileCuda; i += kLanes) sum += squares[warp][i];
      }
      __syncthreads();
    }
    if (warp >= 2) continue;
    sum = grad::sum_of_lanes(sum);
    if (grad::lane_of_thread() == 0) (warp == 0 ? sums[chunk].param : sums[chunk].direction) = sum;
  }
}

// A warp per parameter.
template <template <class> class RuleOf>
__global__ void __launch_bounds__(kThreads) adapt_rules(StepJob job, const LayerSums* sums, RuleArgs* rules) {
  using Args = typename RuleOf<float>::Args;
  constexpr int kWarps = kThreads / kLanes;
  if (treatment_of_job(job).skips) return;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes; i < job.num_params;
       i += static_cast<int64_t>(gridDim.x) * kWarps) {
    const ParamJob& param = job.params[i];
    const LayerSums* own = sums + param.first_chunk;
    const int64_t count = (param.numel + kChunk - 1) / kChunk;
    LayerSums total;
    total.param = grad::sum_in_lanes(0, count, [=](int64_t chunk) { return own[chunk].param; });
    total.direction = grad::sum_in_lanes(0, count, [=](int64_t chunk) { return own[chunk].direction; });
    if (grad::lane_of_thread() != 0) continue;
    Args args = rules[i].as<Args>();
    args.adapt(total, param.numel);
    rules[i] = RuleArgs::of(args);
  }
}

template <template <class> class RuleOf>
void adapt(const StepJob& job, int64_t num_chunks, LayerSums* sums, RuleArgs* rules, void* stream) {
  const auto read = job.in_double ? layer_sums<RuleOf, double> : layer_sums<RuleOf, float>;
  launch_cuda("launching the norms of parameters", read, std::min(num_chunks, kMaxBlocks), kThreads, stream, job,
              num_chunks, sums);
  constexpr int64_t kWarps = kThreads / kLanes;
  launch_cuda("launching what norms make of a step", adapt_rules<RuleOf>,
              std::min((job.num_params + kWarps - 1) / kWarps, kMaxBlocks), kThreads, stream, job, sums, rules);
}

}  // namespace

void adapt_cuda(const StepJob& job, int64_t num_chunks, LayerSums* sums, RuleArgs* rules, void* stream) {
  if (num_chunks == 0) return;
  switch (job.kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return adapt<Rule>(job, num_chunks, sums, rules, stream);
    DT_LAYER_RULES(DT_CASE)
#undef DT_CASE
    default:  // no other asks for norms
      return;
  }
}

}  // namespace drivetrain::optim
