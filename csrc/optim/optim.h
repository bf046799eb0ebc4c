// Registers the optimizer step with Python.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::optim {

void register_optim(pybind11::module_& m);

}  // namespace drivetrain::optim
