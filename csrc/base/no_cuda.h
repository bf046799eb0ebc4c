// Declares the error of a build without nvcc. Needs no torch header.
#pragma once

namespace drivetrain {

// Throws UnsupportedError, as every CUDA function does in a build without nvcc.
[[noreturn]] void refuse_cuda();

}  // namespace drivetrain
