// Declares a way to read `self` from a frame without changing the frame.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain {

// Returns the current value of the first argument of the frame's function, which must be named self, or None if it has
// no value now. The caller holds the GIL.
pybind11::object frame_self(pybind11::handle frame);

}  // namespace drivetrain
