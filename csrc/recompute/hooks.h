// Defines helpers to push saved-tensor hooks that are implemented in C++.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>

#include <memory>
#include <utility>

namespace drivetrain::recompute {

// Wraps a C++ value in a Python capsule, which owns it.
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

// Returns the value in a capsule; throws if the name is another.
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

// Pushes hooks for as long as the object lives.
class HooksGuard {
 public:
  HooksGuard(PyMethodDef* pack, const pybind11::object& pack_self, PyMethodDef* unpack) {
    push_hooks(pack, pack_self, unpack);
  }
  ~HooksGuard() { pop_hooks(); }
  HooksGuard(const HooksGuard&) = delete;
  HooksGuard& operator=(const HooksGuard&) = delete;
};

}  // namespace drivetrain::recompute
