// Replaces the tensors among arguments with capsules, and back; see inputs.h.
#include "recompute/inputs.h"

#include <torch/csrc/autograd/python_variable.h>

#include "base/check.h"

namespace py = pybind11;

namespace drivetrain::recompute {
namespace {

constexpr const char* kTensorIndex = "drivetrain.Inputs";  // holds the index plus 1, because capsules hold no null

py::object capsule_of(size_t index) {
  return py::reinterpret_steal<py::object>(PyCapsule_New(reinterpret_cast<void*>(index + 1), kTensorIndex, nullptr));
}

bool is_capsule(PyObject* object) { return PyCapsule_IsValid(object, kTensorIndex); }

size_t index_in(PyObject* capsule) { return reinterpret_cast<size_t>(PyCapsule_GetPointer(capsule, kTensorIndex)) - 1; }

// Copies a nested structure and replaces each leaf with leaf(object).
template <class Leaf>
py::object with_leaves(PyObject* object, const Leaf& leaf) {
  if (PyTuple_CheckExact(object)) {
    const Py_ssize_t size = PyTuple_GET_SIZE(object);
    py::tuple copy(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyTuple_SET_ITEM(copy.ptr(), i, with_leaves(PyTuple_GET_ITEM(object, i), leaf).release().ptr());
    }
    return copy;
  }
  if (!PyList_CheckExact(object) && !PyDict_CheckExact(object)) return leaf(object);
  if (Py_EnterRecursiveCall(" in the arguments of a checkpointed function") != 0) throw py::error_already_set();
  const struct Leave {
    ~Leave() { Py_LeaveRecursiveCall(); }
  } leave;
  if (PyList_CheckExact(object)) {
    py::list copy;
    for (py::handle item : py::reinterpret_borrow<py::list>(object)) copy.append(with_leaves(item.ptr(), leaf));
    return copy;
  }
  py::dict copy;
  for (auto [key, value] : py::reinterpret_borrow<py::dict>(object)) copy[key] = with_leaves(value.ptr(), leaf);
  return copy;
}

// Returns the path below `name` to the tensor of this index; empty: it is not there.
std::string path_to(size_t index, PyObject* object, const std::string& name) {
  if (is_capsule(object)) return index_in(object) == index ? name : "";
  const auto below = [&](py::handle key, py::handle value) {
    return path_to(index, value.ptr(), text(name, "[", py::repr(key).cast<std::string>(), "]"));
  };
  std::string path;
  if (PyDict_CheckExact(object)) {
    for (auto [key, value] : py::reinterpret_borrow<py::dict>(object)) {
      if (path.empty()) path = below(key, value);
    }
  } else if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
    const auto items = py::reinterpret_borrow<py::sequence>(object);
    for (size_t i = 0; i < items.size() && path.empty(); ++i) path = below(py::int_(i), items[i]);
  }
  return path;
}

}  // namespace

Inputs::Inputs(py::tuple args, py::dict kwargs) {
  const auto keep = [this](PyObject* object) {
    if (!THPVariable_Check(object)) return py::reinterpret_borrow<py::object>(object);
    const at::Tensor& tensor = THPVariable_Unpack(object);
    inputs_.push_back({torch::autograd::SavedVariable(tensor, /*is_output=*/false), tensor._version()});
    return capsule_of(inputs_.size() - 1);
  };
  args_ = with_leaves(args.ptr(), keep);
  kwargs_ = with_leaves(kwargs.ptr(), keep);
}

std::pair<py::tuple, py::dict> Inputs::get() const {
  const auto unpack = [this](PyObject* object) {
    if (!is_capsule(object)) return py::reinterpret_borrow<py::object>(object);
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(inputs_[index_in(object)].saved.unpack()));
  };
  return {with_leaves(args_.ptr(), unpack), with_leaves(kwargs_.ptr(), unpack)};
}

std::string Inputs::first_written() const {
  for (size_t index = 0; index < inputs_.size(); ++index) {
    const std::optional<at::Tensor> tensor = inputs_[index].saved.get_raw_data();
    if (!tensor || !tensor->defined() || tensor->_version() == inputs_[index].version) continue;
    for (size_t i = 0; i < args_.size(); ++i) {
      const std::string path = path_to(index, PyTuple_GET_ITEM(args_.ptr(), i), text("argument ", i));
      if (!path.empty()) return path;
    }
    for (auto [name, value] : kwargs_) {
      const std::string path = path_to(index, value.ptr(), text("argument '", name.cast<std::string>(), "'"));
      if (!path.empty()) return path;
    }
  }
  return "";
}

}  // namespace drivetrain::recompute
