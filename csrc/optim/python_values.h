// Reads names, numbers and tensors from Python objects without Python-level calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

namespace drivetrain::optim {

// Returns whether a dict's key equals that interned name. An unpickled key may be equal without being interned.
inline bool is_name(PyObject* key, PyObject* name) {
  return key == name || (PyUnicode_CheckExact(key) && PyUnicode_GET_LENGTH(key) == PyUnicode_GET_LENGTH(name) &&
                         PyUnicode_KIND(key) == PyUnicode_KIND(name) &&
                         std::memcmp(PyUnicode_DATA(key), PyUnicode_DATA(name),
                                     PyUnicode_GET_LENGTH(name) * PyUnicode_KIND(name)) == 0);
}

// Returns the value if it is a tensor on a CUDA device, else null.
inline const at::Tensor* cuda_tensor(PyObject* value) {
  if (!THPVariable_Check(value)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(value);
  return tensor.is_cuda() ? &tensor : nullptr;
}

inline double number_of(PyObject* value) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return number;
}

}  // namespace drivetrain::optim
