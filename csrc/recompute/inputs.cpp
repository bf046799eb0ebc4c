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

// Returns a shallow copy. An instance of a subclass makes it itself, or gets its attributes without its own methods.
py::object copy_of(PyObject* object) {
  if (PyList_CheckExact(object)) return py::list();
  if (PyDict_CheckExact(object)) return py::dict();
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(object)));
  static const auto* copy = new py::object(py::module_::import("copy").attr("copy"));  // leaked: it may outlive Python
  try {
    py::object made = (*copy)(py::handle(object));
    if (py::type::of(made).is(type) && !made.is(py::handle(object))) return made;
  } catch (const py::error_already_set&) {  // a method of the class has raised
  }
  py::object made = type.attr("__new__")(type);
  if (PyObject_HasAttrString(object, "__dict__") != 0) {
    made.attr("__dict__").attr("update")(py::handle(object).attr("__dict__"));
  }
  return made;
}

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
  if (!PyList_Check(object) && !PyDict_Check(object)) return leaf(object);
  if (Py_EnterRecursiveCall(" in the arguments of a checkpointed function") != 0) throw py::error_already_set();
  const struct Leave {
    ~Leave() { Py_LeaveRecursiveCall(); }
  } leave;
  const py::object copy = copy_of(object);
  // A subclass may replace the methods that read and write its items, so Python's own functions do.
  if (PyList_Check(object)) {
    py::list items;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
      items.append(with_leaves(PyList_GET_ITEM(object, i), leaf));
    }
    if (PyList_SetSlice(copy.ptr(), 0, PyList_GET_SIZE(copy.ptr()), items.ptr()) != 0) throw py::error_already_set();
    return copy;
  }
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(object, &position, &key, &value)) {
    if (PyDict_SetItem(copy.ptr(), key, with_leaves(value, leaf).ptr()) != 0) throw py::error_already_set();
  }
  return copy;
}

// Returns the path below `name` to the tensor of this index; empty: it is not there.
std::string path_to(size_t index, PyObject* object, const std::string& name) {
  if (is_capsule(object)) return index_in(object) == index ? name : "";
  const auto below = [&](py::handle key, py::handle value) {
    return path_to(index, value.ptr(), text(name, "[", py::repr(key).cast<std::string>(), "]"));
  };
  std::string path;
  if (PyDict_Check(object)) {
    for (auto [key, value] : py::reinterpret_borrow<py::dict>(object)) {
      if (path.empty()) path = below(key, value);
    }
  } else if (PyTuple_CheckExact(object) || PyList_Check(object)) {
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
