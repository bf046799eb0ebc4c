// Declares a holder for Python functions that native code may release on any thread.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace drivetrain {

// Returns a shared pointer whose deleter takes the GIL, so that any thread may drop the last reference.
inline std::shared_ptr<pybind11::function> hold(pybind11::function function) {
  return {new pybind11::function(std::move(function)), [](pybind11::function* held) {
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace drivetrain
