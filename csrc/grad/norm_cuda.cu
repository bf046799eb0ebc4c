// The sums of squares of gradients on CUDA, one warp per chunk. Includes no torch header.
#include <algorithm>

#include "base/launch_cuda.h"
#include "grad/lanes_cuda.cuh"
#include "grad/norm.h"
#include "optim/step.h"

namespace drivetrain::grad {
namespace {

using optim::Format;
using optim::ParamJob;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;

__device__ double square(double value) { return value * value; }

__device__ double chunk_sum(const optim::Stream& stream, int64_t begin, int64_t end) {
  switch (stream.format) {
    case Format::kFloat64: {
      const auto* values = static_cast<const double*>(stream.data);
      return sum_in_lanes(begin, end, [=](int64_t i) { return square(values[i]); });
    }
    case Format::kBFloat16: {
      const auto* values = static_cast<const uint16_t*>(stream.data);
      return sum_in_lanes(begin, end, [=](int64_t i) { return square(optim::float_from_bfloat16(values[i])); });
    }
    case Format::kFloat16: {
      const auto* values = static_cast<const uint16_t*>(stream.data);
      return sum_in_lanes(begin, end, [=](int64_t i) { return square(optim::float_from_float16(values[i])); });
    }
    default: {
      const auto* values = static_cast<const float*>(stream.data);
      return sum_in_lanes(begin, end, [=](int64_t i) { return square(values[i]); });
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    chunk_sums(const ParamJob* params, int32_t num_params, int64_t num_chunks, double* sums) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  for (int64_t chunk = first; chunk < num_chunks; chunk += static_cast<int64_t>(gridDim.x) * kWarps) {
    const ParamJob& param = params[last_from(params, num_params, &ParamJob::first_chunk, chunk)];
    const int64_t begin = (chunk - param.first_chunk) * kChunk;
    const int64_t end = param.numel < begin + kChunk ? param.numel : begin + kChunk;
    const double sum = chunk_sum(param.grad, begin, end);
    if (lane_of_thread() == 0) sums[chunk] = sum;
  }
}

}  // namespace

void chunk_sums_cuda(const ParamJob* params, int32_t num_params, int64_t num_chunks, double* sums, void* stream) {
  constexpr int64_t kMaxBlocks = 1 << 14;  // fills any GPU; more chunks loop
  if (num_chunks == 0) return;
  const int64_t blocks = std::min((num_chunks + kWarps - 1) / kWarps, kMaxBlocks);
  launch_cuda("launching the norm of gradients", chunk_sums, blocks, kThreads, stream, params, num_params, num_chunks,
              sums);
}

}  // namespace drivetrain::grad
