// The CUDA loop: one launch for all parameters; each block takes tiles of the flat order and finds their parameters.
#pragma once

#include "optim/step.h"

namespace drivetrain::optim {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 4;  // loads in flight per thread before the first is used
constexpr int kTileCuda = kThreads * kElementsPerThread;

// Updates [begin, end) of one parameter, the block's threads side by side.
template <template <class> class RuleOf, class T>
__device__ void update_range(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end) {
  using Rule = RuleOf<T>;
  const Rule rule(job.rules[param.rule].template as<typename Rule::Args>());
  for (int64_t base = begin; base < end; base += kTileCuda) {
    T value[kElementsPerThread], grad[kElementsPerThread], state[kElementsPerThread][kMaxStates];
#pragma unroll
    for (int k = 0; k < kElementsPerThread; ++k) {
      const int64_t i = base + k * kThreads + threadIdx.x;
      if (i >= end) break;
      value[k] = load_one<T>(param.param, i);
      grad[k] = load_one<T>(param.grad, i);
#pragma unroll
      for (int s = 0; s < Rule::kNumStates; ++s) state[k][s] = load_one<T>(param.state[s], i);
    }
#pragma unroll
    for (int k = 0; k < kElementsPerThread; ++k) {
      const int64_t i = base + k * kThreads + threadIdx.x;
      if (i >= end) break;
      rule(value[k], grad[k], state[k]);
      store_one<T>(param.param, i, value[k]);
#pragma unroll
      for (int s = 0; s < Rule::kNumStates; ++s) store_one<T>(param.state[s], i, state[k][s]);
    }
  }
}

template <template <class> class RuleOf, class T>
__global__ void __launch_bounds__(kThreads) loop_cuda(StepJob job) {
  for (int64_t tile = blockIdx.x; tile * kTileCuda < job.total; tile += gridDim.x) {
    int64_t position = tile * kTileCuda;
    const int64_t tile_end = position + kTileCuda < job.total ? position + kTileCuda : job.total;
    for (int32_t index = find_param(job, position); position < tile_end; ++index) {
      const ParamJob param = job.params[index];
      const int64_t param_end = param.begin + param.numel;
      const int64_t end = param_end < tile_end ? param_end : tile_end;
      update_range<RuleOf, T>(job, param, position - param.begin, end - param.begin);
      position = end;
    }
  }
}

}  // namespace drivetrain::optim
