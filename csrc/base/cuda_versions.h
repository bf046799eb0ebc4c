// Declares the query for the CUDA versions of the module and the driver. Needs no torch or CUDA header.
#pragma once

namespace drivetrain {

// Holds versions in CUDA's numbering: 13020 is 13.2.
struct CudaVersions {
  int runtime = 0;  // the runtime library that the module uses; 0: built without CUDA
  int driver = 0;   // the newest runtime that the driver supports; 0: no driver is installed
};

// Creates no CUDA context. The version in no_cuda.cpp returns zeros.
CudaVersions cuda_versions();

}  // namespace drivetrain
