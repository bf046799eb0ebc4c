// Launches of CUDA kernels by a plain call, which tests replace with one that runs them on the CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/check_cuda.h"

namespace drivetrain {

// Enqueues kernel(args...) on a stream (a cudaStream_t).
template <class... Params, class... Args>
void launch_cuda(const char* what, void (*kernel)(Params...), int64_t blocks, int threads, void* stream,
                 const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), what);
}

}  // namespace drivetrain
