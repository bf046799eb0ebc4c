// Takes the place of csrc/base/launch_cuda.h in front of it: gives each launch its words as a name, for reports.
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
