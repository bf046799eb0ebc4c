// Registers the states of rules with Python: their names, shapes and conversions.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::optim {

void register_state(pybind11::module_& m);

}  // namespace drivetrain::optim
