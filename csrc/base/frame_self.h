// Where a thread is, without a trace of having looked.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain {

// frame: of a function whose first argument is called self. Returns that argument as the frame has it now; None if it
// has none. The GIL must be held.
pybind11::object frame_self(pybind11::handle frame);

}  // namespace drivetrain
