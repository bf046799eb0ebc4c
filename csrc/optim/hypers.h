// What a step asks of its hyper-parameters.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace drivetrain::optim {

// Throws, naming the group and the argument, unless all of a group's numbers, by the names that its native rule reads,
// are finite and within the bounds of torch's constructors. Those look once and at the defaults only, but schedulers
// and users write into groups at any time. What is on a CUDA device is not looked at. group: its place in param_groups.
void check_hypers(pybind11::handle hypers, size_t group);

}  // namespace drivetrain::optim
