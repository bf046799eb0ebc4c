// Checks the bounds of a step's hyper-parameters.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace drivetrain::optim {

// Throws, naming the group and the argument, unless all numbers of a group are finite and within the bounds of torch's
// constructors. torch checks only the constructor's defaults, but schedulers and users may write into groups at any
// time. Numbers on a CUDA device are not checked. `group` is the position in param_groups.
void check_hypers(pybind11::handle hypers, size_t group);

}  // namespace drivetrain::optim
