// Registers activation checkpointing with Python: regions, the recorder of forward passes, the solver of what to keep,
// and smaller forms of what is kept.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::activation {

void register_activation(pybind11::module_& m);
void register_record(pybind11::module_& m);
void register_solver(pybind11::module_& m);
void register_pack(pybind11::module_& m);
void register_offload(pybind11::module_& m);

}  // namespace drivetrain::activation
