// Declares the addresses of a parameter's objects, which a step prefetches.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include "optim/rules/hypers.h"

namespace drivetrain::optim {

inline void prefetch(const void* address, int lines = 1) {
  constexpr int kLine = 64;
  for (int i = 0; i < lines; ++i) __builtin_prefetch(static_cast<const char*>(address) + i * kLine);
}

// Addresses of one parameter's objects in the last step. With thousands of small parameters, cache misses dominate a
// step, so it prefetches these lines some parameters ahead. A stale address costs nothing, because it is only
// prefetched.
struct Footprint {
  static constexpr int kMaxTensors = 4 + 2 * kMaxStates;  // parameter, gradient, and its extra, step, states, scales
  const void* dict_keys = nullptr;                        // keys of the parameter's state
  const void* step_value = nullptr;
  const void* meta = nullptr;  // autograd metadata of the parameter, which holds the gradient
  int num_objects = 0, num_tensors = 0;
  const void* tensors[kMaxTensors] = {};         // c10::TensorImpl; the parameter and the gradient come first
  const void* storages[kMaxTensors] = {};        // c10::StorageImpl
  const void* objects[2 + 2 * kMaxStates] = {};  // PyObject of step, extra, states and scales

  // Prefetches the parameter and the gradient; or all, with the state.
  void prefetch(bool with_state) const;
  void add(const at::Tensor& tensor);
  void add(PyObject* object, const at::Tensor& tensor);
};

}  // namespace drivetrain::optim
