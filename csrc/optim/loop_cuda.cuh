// The CUDA loop: one launch for all parameters; each block takes tiles of the flat order and finds their parameters.
#pragma once

#include "optim/step.h"

namespace drivetrain::optim {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 4;  // loads in flight per thread before the first is used
constexpr int kTileCuda = kThreads * kElementsPerThread;

// This thread's elements of a tile that begins at `base`, side by side with the block's other threads. The format is
// looked at once per tile.
template <class Value, class T, class FromValue>
__device__ void load_elements(const Value* from, int64_t base, int64_t end, T (&values)[kElementsPerThread],
                              FromValue from_value) {
#pragma unroll
  for (int k = 0; k < kElementsPerThread; ++k) {
    const int64_t i = base + k * kThreads + threadIdx.x;
    if (i < end) values[k] = from_value(from[i]);
  }
}

template <class Value, class T, class ToValue>
__device__ void store_elements(Value* to, int64_t base, int64_t end, const T (&values)[kElementsPerThread],
                               ToValue to_value) {
#pragma unroll
  for (int k = 0; k < kElementsPerThread; ++k) {
    const int64_t i = base + k * kThreads + threadIdx.x;
    if (i < end) to[i] = to_value(values[k]);
  }
}

template <class T>
__device__ void load_tile(const Stream& stream, int64_t base, int64_t end, T (&values)[kElementsPerThread]) {
  switch (stream.format) {
    case Format::kFloat32:
      return load_elements(static_cast<const float*>(stream.data), base, end, values,
                           [](float value) { return static_cast<T>(value); });
    case Format::kFloat64:
      return load_elements(static_cast<const double*>(stream.data), base, end, values,
                           [](double value) { return static_cast<T>(value); });
    case Format::kBFloat16:
      return load_elements(static_cast<const uint16_t*>(stream.data), base, end, values,
                           [](uint16_t bits) { return static_cast<T>(float_from_bfloat16(bits)); });
    case Format::kFloat16:
      return load_elements(static_cast<const uint16_t*>(stream.data), base, end, values,
                           [](uint16_t bits) { return static_cast<T>(float_from_float16(bits)); });
  }
}

template <class T>
__device__ void store_tile(const Stream& stream, int64_t base, int64_t end, const T (&values)[kElementsPerThread]) {
  switch (stream.format) {
    case Format::kFloat32:
      return store_elements(static_cast<float*>(stream.data), base, end, values,
                            [](T value) { return static_cast<float>(value); });
    case Format::kFloat64:
      return store_elements(static_cast<double*>(stream.data), base, end, values,
                            [](T value) { return static_cast<double>(value); });
    case Format::kBFloat16:
      return store_elements(static_cast<uint16_t*>(stream.data), base, end, values,
                            [](T value) { return bfloat16_from_float(static_cast<float>(value)); });
    case Format::kFloat16:
      return store_elements(static_cast<uint16_t*>(stream.data), base, end, values,
                            [](T value) { return float16_from_float(static_cast<float>(value)); });
  }
}

// Updates [begin, end) of one parameter.
template <template <class> class RuleOf, class T>
__device__ void update_range(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end) {
  using Rule = RuleOf<T>;
  const Rule rule(job.rules[param.rule].template as<typename Rule::Args>());
  const T factor = T(job.treatment.factor);
  for (int64_t base = begin; base < end; base += kTileCuda) {
    T value[kElementsPerThread] = {}, grad[kElementsPerThread] = {}, state[kMaxStates][kElementsPerThread] = {};
    load_tile(param.param, base, end, value);
    load_tile(param.grad, base, end, grad);
#pragma unroll
    for (int s = 0; s < Rule::kNumStates; ++s) load_tile(param.state[s], base, end, state[s]);
#pragma unroll
    for (int k = 0; k < kElementsPerThread; ++k) {
      T own[kMaxStates];
#pragma unroll
      for (int s = 0; s < Rule::kNumStates; ++s) own[s] = state[s][k];
      grad[k] = factor * grad[k];
      rule(value[k], grad[k], own);
#pragma unroll
      for (int s = 0; s < Rule::kNumStates; ++s) state[s][k] = own[s];
      if (job.treatment.after == GradAfter::kZero) grad[k] = T(0);
    }
    store_tile(param.param, base, end, value);
    if (job.treatment.after != GradAfter::kKeep) store_tile(param.grad, base, end, grad);
#pragma unroll
    for (int s = 0; s < Rule::kNumStates; ++s) store_tile(param.state[s], base, end, state[s]);
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
