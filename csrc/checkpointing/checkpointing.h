// Declares the function that registers the checkpoint writer and reader with Python.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::checkpointing {

void register_checkpointing(pybind11::module_& m);

}  // namespace drivetrain::checkpointing
