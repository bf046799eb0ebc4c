// A failed call of the CUDA runtime as an error of ours. For files that are compiled only where CUDA's headers are.
#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"

namespace drivetrain {

inline std::string describe_cuda(cudaError_t status, const char* call) {
  const char* const cure = status == cudaErrorInsufficientDriver
                               ? "; drivetrain was built by a newer CUDA than this driver knows: run `drivetrain "
                                 "doctor`, which says what to do"
                               : "";
  return text(call, " failed with CUDA error ", static_cast<int>(status), " (", cudaGetErrorName(status),
              "): ", cudaGetErrorString(status), cure);
}

inline void check_cuda(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw EnvironmentError(describe_cuda(status, call));
}

}  // namespace drivetrain
