// Wraps csrc/base/launch_cuda.h, so that reports name each launch by its description.
#pragma once

#include "fake_cuda_kernels.h"

#define launch_cuda launch_cuda_without_name
#include_next "base/launch_cuda.h"
#undef launch_cuda

namespace drivetrain {

template <class... Args>
void launch_cuda(const char* what, Args&&... args) {
  const fake_cuda_kernels::Named named(what);
  launch_cuda_without_name(what, std::forward<Args>(args)...);
}

}  // namespace drivetrain
