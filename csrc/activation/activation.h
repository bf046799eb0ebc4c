// Registers activation checkpointing with Python, and the solver of what to keep.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::activation {

void register_activation(pybind11::module_& m);
void register_solver(pybind11::module_& m);

}  // namespace drivetrain::activation
