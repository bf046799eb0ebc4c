// autograd's hooks on what it saves, as functions of Python's made in C++.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>

#include <memory>
#include <utility>

namespace drivetrain::checkpoint {

// A C++ value that Python holds.
template <class T>
pybind11::object capsule(T value, const char* name) {
  auto owned = std::make_unique<T>(std::move(value));
  PyObject* made = PyCapsule_New(owned.get(), name, [](PyObject* object) {
    delete static_cast<T*>(PyCapsule_GetPointer(object, PyCapsule_GetName(object)));
  });
  if (made == nullptr) throw pybind11::error_already_set();
  owned.release();
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

template <class T>
T& value_in(PyObject* object, const char* name) {
  void* value = PyCapsule_GetPointer(object, name);
  if (value == nullptr) throw pybind11::error_already_set();
  return *static_cast<T*>(value);
}

inline c10::SafePyObject hook(PyMethodDef* definition, PyObject* self) {
  PyObject* made = PyCFunction_New(definition, self);
  if (made == nullptr) throw pybind11::error_already_set();
  return {made, getPyInterpreter()};
}

inline void push_hooks(PyMethodDef* pack, const pybind11::object& pack_self, PyMethodDef* unpack) {
  at::SavedTensorDefaultHooks::lazy_initialize();
  at::SavedTensorDefaultHooks::push_hooks(hook(pack, pack_self.ptr()), hook(unpack, nullptr));
}

inline void pop_hooks() {
  if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) at::SavedTensorDefaultHooks::pop_hooks();
}

// For as long as this object lives.
class HooksGuard {
 public:
  HooksGuard(PyMethodDef* pack, const pybind11::object& pack_self, PyMethodDef* unpack) {
    push_hooks(pack, pack_self, unpack);
  }
  ~HooksGuard() { pop_hooks(); }
  HooksGuard(const HooksGuard&) = delete;
  HooksGuard& operator=(const HooksGuard&) = delete;
};

}  // namespace drivetrain::checkpoint
