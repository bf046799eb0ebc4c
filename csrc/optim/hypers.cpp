// Checks the bounds of hyper-parameters; see hypers.h.
#include "optim/hypers.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>

#include "base/check.h"
#include "base/torch_text.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

// Returns the constructor's name of an argument where the rule's name differs.
std::string_view argument(std::string_view name) {
  if (name == "beta1") return "betas[0]";
  if (name == "beta2") return "betas[1]";
  if (name == "beta3") return "betas[2]";
  if (name == "eps1") return "eps[0]";
  if (name == "eps2") return "eps[1]";
  if (name == "average_decay") return "alpha";
  if (name == "eta_minus") return "etas[0]";
  if (name == "eta_plus") return "etas[1]";
  if (name == "step_size_min") return "step_sizes[0]";
  if (name == "step_size_max") return "step_sizes[1]";
  return name;
}

// A hyper-parameter's bound in words, and whether a number is within it.
struct Bound {
  const char* words;
  bool holds;
};

Bound bound_of(std::string_view name, double value) {
  constexpr std::string_view kNotNegative[] = {"lr",       "weight_decay", "eps",   "eps1",           "eps2",
                                               "lr_decay", "momentum",     "alpha", "momentum_decay", "warmup_steps"};
  if (name == "beta1" || name == "beta2" || name == "beta3")
    return {"a number of at least 0 and below 1", value >= 0 && value < 1};
  const bool is_finite = std::isfinite(value);
  if (std::find(std::begin(kNotNegative), std::end(kNotNegative), name) != std::end(kNotNegative)) {
    return {"a finite number, 0 or above", is_finite && value >= 0};
  }
  if (name == "beta2_decay") return {"a finite number, 0 or below", is_finite && value <= 0};
  if (name == "rho") return {"a number from 0 to 1", value >= 0 && value <= 1};
  if (name == "eta_minus") return {"a number above 0 and below 1", value > 0 && value < 1};
  if (name == "eta_plus") return {"a finite number above 1", is_finite && value > 1};
  if (name == "d") return {"a finite number, 1 or above", is_finite && value >= 1};
  return {"a finite number", is_finite};
}

}  // namespace

void check_hypers(py::handle hypers, size_t group) {
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(hypers.ptr(), &position, &key, &value)) {
    const char* name = PyUnicode_AsUTF8(key);
    if (name == nullptr) throw py::error_already_set();
    // The step reads such a learning rate on the device; checking it here would wait for the device.
    if (name == std::string_view("lr") && THPVariable_Check(value) && THPVariable_Unpack(value).is_cuda()) continue;
    const double number = PyFloat_AsDouble(value);
    if (number == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw UserTypeError(text("param_groups[", group, "]: ", argument(name), " is ",
                               py::repr(value).cast<std::string>(), ", expected a number."));
    }
    if (const Bound bound = bound_of(name, number); !bound.holds) {
      throw UserError(
          text("param_groups[", group, "]: ", argument(name), " is ", number, ", expected ", bound.words, "."));
    }
  }
}

}  // namespace drivetrain::optim
