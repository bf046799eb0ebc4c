// States outside a step: what a rule keeps, and states made, converted and read. Registered with Python by optim.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::optim {

void register_state(pybind11::module_& m);

}  // namespace drivetrain::optim
