// Launches CUDA kernels through a plain function call, which tests replace to run kernels on the CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/check_cuda.h"

namespace drivetrain {

// Enqueues kernel(args...) on `stream`, a cudaStream_t. `what` names the launch in the error message.
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
