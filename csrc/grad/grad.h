// Registers the functions on gradients with Python.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::grad {

void register_grad(pybind11::module_& m);

}  // namespace drivetrain::grad
