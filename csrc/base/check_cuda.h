// Turns failed CUDA runtime calls into EnvironmentError. Only files that are compiled with CUDA's headers include it.
#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"

namespace drivetrain {

inline std::string describe_cuda(cudaError_t status, const char* call) {
  const char* const cure = status == cudaErrorInsufficientDriver
                               ? "; drivetrain was built with a newer CUDA than this driver supports: run `drivetrain "
                                 "doctor` for the remedy"
                               : "";
  return text(call, " failed with CUDA error ", static_cast<int>(status), " (", cudaGetErrorName(status),
              "): ", cudaGetErrorString(status), cure);
}

inline void check_cuda(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw EnvironmentError(describe_cuda(status, call));
}

}  // namespace drivetrain
