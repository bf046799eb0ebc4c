// Declares the binding of the process's trace.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::trace {

void register_trace(pybind11::module_& m);

}  // namespace drivetrain::trace
