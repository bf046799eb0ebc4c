// A gradient's accumulation on CUDA. Includes no torch header.
#include <algorithm>

#include "base/launch_cuda.h"
#include "grad/accumulate.h"
#include "optim/loop_cuda.cuh"

namespace drivetrain::grad {
namespace {

using optim::kElementsPerThread;
using optim::kThreads;
using optim::kTileCuda;

__global__ void __launch_bounds__(kThreads) accumulate_tiles(Addition addition, int64_t numel) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kTileCuda;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kTileCuda; base < numel; base += stride) {
    float sum[kElementsPerThread] = {}, added[kElementsPerThread] = {};
    optim::load_plain(addition.micro, base, numel, added);
    if (!addition.starts) optim::load_param(addition.main, base, numel, sum);
#pragma unroll
    for (int k = 0; k < kElementsPerThread; ++k) sum[k] = addition.starts ? added[k] : sum[k] + added[k];
    optim::store_param(addition.main, /*key=*/0, base, numel, sum);
  }
}

}  // namespace

void accumulate_cuda(const Addition& addition, int64_t numel, void* stream) {
  constexpr int64_t kMaxBlocks = 1 << 14;  // fills any GPU; more tiles loop
  if (numel == 0) return;
  const int64_t blocks = std::min((numel + kTileCuda - 1) / kTileCuda, kMaxBlocks);
  launch_cuda("launching a gradient's accumulation", accumulate_tiles, blocks, kThreads, stream, addition, numel);
}

}  // namespace drivetrain::grad
