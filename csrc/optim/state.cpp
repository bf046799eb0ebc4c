// Registers the layout and the conversion of states and parameters with Python.
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "formats/conversions.h"
#include "optim/optim.h"
#include "optim/precision.h"
#include "optim/step_reader.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

Rounding rounding_of(const std::string& name) {
  for (const auto& [rounding, known] :
       {std::pair(Rounding::kNearest, "nearest"), std::pair(Rounding::kStochastic, "stochastic"),
        std::pair(Rounding::kKahan, "kahan")}) {
    if (name == known) return rounding;
  }
  throw UserError(text("rounding is '", name, "', expected 'nearest', 'stochastic' or 'kahan'"));
}

}  // namespace

void register_state(py::module_& m) {
  py::class_<Precision>(m, "Precision")
      .def(py::init(
               [](int state_bits, bool float8, int master_bits, int64_t min_8bit_size, const std::string& rounding) {
                 return Precision{state_bits, float8, master_bits, min_8bit_size, rounding_of(rounding)};
               }),
           py::kw_only(), py::arg("state_bits"), py::arg("float8"), py::arg("master_bits"), py::arg("min_8bit_size"),
           py::arg("rounding"));
  // Returns the rule's states by name, each with its kind (precision.h).
  m.def(
      "optim_states",
      [](const std::string& rule) {
        std::vector<std::pair<std::string, int>> states;
        for (const RuleInfo::State& state : find_rule(rule).states) {
          states.emplace_back(py::handle(state.name).cast<std::string>(), static_cast<int>(state.kind));
        }
        return states;
      },
      py::arg("rule"));
  m.def(
      "optim_counts_steps",
      [](const std::string& rule, const Precision& precision) {
        return find_rule(rule).counts_steps || precision.rounding == Rounding::kStochastic;
      },
      py::arg("rule"), py::arg("precision"));
  // Returns the names of the rule's scalars (rules/hypers.h), and of the scalars of all rules.
  m.def(
      "optim_scalars",
      [](const std::string& rule) {
        std::vector<std::string> names;
        for (PyObject* name : find_rule(rule).scalars) names.push_back(py::handle(name).cast<std::string>());
        return names;
      },
      py::arg("rule"));
  m.def("optim_scalar_names", [] {
    std::vector<std::string> names;
    for (const RuleInfo& rule : all_rules()) {
      for (PyObject* name : rule.scalars) names.push_back(py::handle(name).cast<std::string>());
    }
    return names;
  });
  // Returns the shape of a state of this parameter; None if it has no such state.
  m.def(
      "optim_state_shape",
      [](const at::Tensor& param, int kind) {
        return state_sizes(*param.unsafeGetTensorImpl(), static_cast<StateKind>(kind));
      },
      py::arg("param"), py::arg("kind"));
  // Returns the dtype that marks the format of a state of this parameter; None allows any floating one.
  m.def(
      "optim_state_dtype",
      [](const Precision& precision, const at::Tensor& param, int kind) {
        return state_dtype(precision, *param.unsafeGetTensorImpl(), static_cast<StateKind>(kind));
      },
      py::arg("precision"), py::arg("param"), py::arg("kind"));
  // Returns the dtypes that tensors of states of this kind have in blocks.
  m.def(
      "optim_block_dtypes",
      [](int kind) {
        const auto dtypes = block_dtypes(static_cast<StateKind>(kind));
        return dtypes ? std::vector<at::ScalarType>{dtypes->codes, dtypes->float8} : std::vector<at::ScalarType>{};
      },
      py::arg("kind"));
  m.def(
      "optim_keeps_32_bits",
      [](const Precision& precision, const at::Tensor& param) {
        return keeps_32_bits(precision, *param.unsafeGetTensorImpl());
      },
      py::arg("precision"), py::arg("param"));
  m.def("optim_why_not", &why_not, py::arg("precision"), py::arg("dtype"));
  m.def(
      "optim_is_state_as",
      [](const at::Tensor& param, const at::Tensor& state, const std::optional<at::Tensor>& scales,
         std::optional<at::ScalarType> dtype) { return is_state_as(param, state, scales ? &*scales : nullptr, dtype); },
      py::arg("param"), py::arg("state"), py::arg("scales"), py::arg("dtype"));
  // Returns name and dtype of the parameter's companion, or None.
  m.def(
      "optim_param_extra",
      [](const Precision& precision, const at::Tensor& param) -> std::optional<std::pair<std::string, at::ScalarType>> {
        const auto extra = extra_of(param_format(precision, param.scalar_type()));
        if (!extra) return std::nullopt;
        return std::pair<std::string, at::ScalarType>(extra->name, extra->dtype);
      },
      py::arg("precision"), py::arg("param"));
  m.def("optim_load_state", &load_state, py::arg("state"), py::arg("scales"), py::arg("param") = py::none());
  // Returns whether a byte of the codes has two values.
  m.def(
      "optim_is_packed",
      [](const at::Tensor& codes, const at::Tensor& scales) { return is_packed(marked_dtype(codes, &scales)); },
      py::arg("codes"), py::arg("scales"));
  m.def(
      "optim_store_state",
      [](const at::Tensor& param, const at::Tensor& values, at::ScalarType dtype) {
        Conversions one;
        auto stored = one.converted_state(param, values.to(param.device()), std::nullopt, dtype);
        one.run();
        return stored;
      },
      py::arg("param"), py::arg("values"), py::arg("dtype"));
  m.def("optim_load_param", &load_param, py::arg("param"), py::arg("extra"));
  m.def(
      "optim_store_param",
      [](const at::Tensor& param, const at::Tensor& values, at::ScalarType dtype) {
        Conversions one;
        const at::Tensor extra = one.stored_param(param, values, dtype);
        one.run();
        return extra;
      },
      py::arg("param"), py::arg("values"), py::arg("dtype"));
  py::class_<Conversions>(m, "Conversions")
      .def(py::init())
      .def("new_state", &Conversions::new_state, py::arg("param"), py::arg("sizes"), py::arg("dtype"), py::arg("fill"))
      .def("converted_state", &Conversions::converted_state, py::arg("param"), py::arg("state"), py::arg("scales"),
           py::arg("dtype"))
      .def("new_extra", &Conversions::new_extra, py::arg("param"), py::arg("before"), py::arg("dtype"))
      .def("new_counter", &Conversions::new_counter, py::arg("device"), py::arg("dtype"), py::arg("value") = 0.0)
      .def("run", &Conversions::run, py::call_guard<py::gil_scoped_release>());
  // Returns the bytes of codes and of their scales for so many values; None for a dtype that marks no format in blocks.
  m.def(
      "optim_coded_bytes",
      [](at::ScalarType dtype, int64_t numel) -> std::optional<std::pair<int64_t, int64_t>> {
        const std::optional<Format> format = block_format_of(dtype);
        if (!format) return std::nullopt;
        return std::pair(data_bytes(*format, numel), num_scales(*format, numel) * int64_t{sizeof(float)});
      },
      py::arg("dtype"), py::arg("numel"));
  m.def("optim_extra_names", [] { return std::vector<std::string>(std::begin(kExtraNames), std::end(kExtraNames)); });
}

}  // namespace drivetrain::optim
