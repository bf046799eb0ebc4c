// Registers activation checkpointing, and activations in smaller forms or on the host, with Python.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::activation {

void register_activation(pybind11::module_& m);
void register_pack(pybind11::module_& m);
void register_offload(pybind11::module_& m);

}  // namespace drivetrain::activation
