// Registers the optimizer step, and the names, shapes and conversions of states, with Python.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::optim {

void register_optim(pybind11::module_& m);
void register_state(pybind11::module_& m);

}  // namespace drivetrain::optim
