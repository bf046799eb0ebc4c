// Declares without_gil(), for destructors that wait.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain {

// Calls a function that waits for a device or for other threads, which may need the GIL to go on or to free a tensor.
template <class Body>
void without_gil(Body&& body) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    const pybind11::gil_scoped_release no_gil;
    body();
  } else {
    body();
  }
}

}  // namespace drivetrain
