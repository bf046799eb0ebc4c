// Declares the function that registers activation checkpointing with Python.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::recompute {

void register_checkpoint(pybind11::module_& m);

}  // namespace drivetrain::recompute
