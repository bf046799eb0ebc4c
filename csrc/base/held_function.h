// Python functions that native code keeps and lets go of on any thread.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace drivetrain {

// Freed under the GIL, wherever its owner lets go of it.
inline std::shared_ptr<pybind11::function> hold(pybind11::function function) {
  return {new pybind11::function(std::move(function)), [](pybind11::function* held) {
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace drivetrain
