// Declares the registration of the reducer and its transports with Python.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::ddp {

void register_ddp(pybind11::module_& m);

}  // namespace drivetrain::ddp
