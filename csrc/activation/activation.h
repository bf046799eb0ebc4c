// Registers activation checkpointing with Python.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::activation {

void register_activation(pybind11::module_& m);

}  // namespace drivetrain::activation
