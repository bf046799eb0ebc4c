// Which CUDA the module was built with and which one the driver knows. Needs no header of torch's or CUDA's.
#pragma once

namespace drivetrain {

// As CUDA counts them: 13020 is 13.2.
struct CudaVersions {
  int runtime = 0;  // the runtime library that the module uses; 0: built without CUDA
  int driver = 0;   // the newest runtime that the driver takes; 0: there is no driver
};

// Starts no context. In no_cuda.cpp both are 0.
CudaVersions cuda_versions();

}  // namespace drivetrain
