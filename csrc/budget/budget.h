// Declares the functions that register the activation budget with Python: its recorder, the calls that it records, and
// its solver.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::budget {

void register_recorder(pybind11::module_& m);
void register_calls(pybind11::module_& m);  // needs the recorder
void register_solver(pybind11::module_& m);

}  // namespace drivetrain::budget
