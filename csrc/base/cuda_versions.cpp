// Queries the versions of the CUDA runtime and driver.
#include "base/cuda_versions.h"

#include "base/check_cuda.h"

namespace drivetrain {

CudaVersions cuda_versions() {
  CudaVersions versions;
  check_cuda(cudaRuntimeGetVersion(&versions.runtime), "cudaRuntimeGetVersion");
  check_cuda(cudaDriverGetVersion(&versions.driver), "cudaDriverGetVersion");
  return versions;
}

}  // namespace drivetrain
