// States made, converted and read outside a step; see state.h. Always on the CPU, through the step's own tiles.
#include "optim/state.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "base/torch_text.h"
#include "optim/precision.h"
#include "optim/step_reader.h"
#include "optim/storage_torch.h"

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

void convert(const Stream& from, const Stream& to, int64_t numel) {
  for_chosen_isa(baseline::convert_cpu, avx2::convert_cpu, avx512::convert_cpu)(from, to, numel, /*key=*/0);
}

// On the CPU and dense in memory; `scales` is what a state of 8 bits has beside it.
Stream state_stream(const at::Tensor& state, const at::Tensor& scales) {
  if (!is_block_dtype(state.scalar_type())) return stream_of(state);
  return {state.data_ptr(), state.scalar_type() == at::kByte ? Format::kSquared8 : Format::kSigned8, scales.data_ptr()};
}

// A state's values as float32, in its own shape and strides.
at::Tensor load_state(const at::Tensor& state, const std::optional<at::Tensor>& scales) {
  if (!is_block_dtype(state.scalar_type())) return state.detach().to(at::kFloat);
  if (!scales || scales->scalar_type() != at::kFloat || scales->numel() != num_blocks(state.numel())) {
    throw UserError(text("an 8-bit state of shape ", state.sizes(), " needs ", num_blocks(state.numel()),
                         " float32 scales, one per block of ", kBlock, "; ",
                         scales ? text("got ", scales->scalar_type(), " of shape ", scales->sizes()) : "got none",
                         "."));
  }
  const at::Tensor codes = state.detach().cpu(), on_cpu = scales->detach().cpu().contiguous();
  at::Tensor values = empty_as_walked(codes, at::kFloat);
  convert(state_stream(codes.is_non_overlapping_and_dense() ? codes : codes.contiguous(), on_cpu), stream_of(values),
          codes.numel());
  return values.to(state.device());
}

// Those values as a state of `param`, laid out as the step walks it, in `dtype`; with its scales if that has 8 bits.
std::tuple<at::Tensor, std::optional<at::Tensor>> store_state(const at::Tensor& param, const at::Tensor& values,
                                                              at::ScalarType dtype) {
  if (!values.sizes().equals(param.sizes())) return {values.detach().to(dtype).contiguous(), std::nullopt};
  if (!is_block_dtype(dtype)) {
    at::Tensor state = empty_as_walked(param, dtype);
    return {state.copy_(values.detach()), std::nullopt};
  }
  const at::Tensor on_cpu = empty_as_walked(param.detach().cpu(), at::kFloat).copy_(values.detach());
  at::Tensor codes = empty_as_walked(on_cpu, dtype);
  at::Tensor scales = at::zeros({num_blocks(codes.numel())}, at::kFloat);
  convert(stream_of(on_cpu), state_stream(codes, scales), codes.numel());
  return {codes.to(param.device()), scales.to(param.device())};
}

Stream param_stream(const at::Tensor& param, const std::optional<at::Tensor>& extra, Format format) {
  return {param.data_ptr(), format, extra ? extra->data_ptr() : nullptr};
}

// The format whose `extra` has this dtype, beside a parameter of that one.
Format param_format_with(at::ScalarType param, at::ScalarType extra) {
  for (const Format format : {Format::kBFloat16Remainder16, Format::kBFloat16Remainder8, Format::kBFloat16Kahan,
                              Format::kFloat16Kahan, Format::kFloat16Master}) {
    const bool is_float16 = format == Format::kFloat16Kahan || format == Format::kFloat16Master;
    if (extra_of(format)->dtype == extra && param == (is_float16 ? at::kHalf : at::kBFloat16)) return format;
  }
  throw UserTypeError(text("a ", param, " parameter has nothing of ", extra, " beside it."));
}

// A parameter's values as float32: with what its rounding left out, if something keeps that.
at::Tensor load_param(const at::Tensor& param, const std::optional<at::Tensor>& extra) {
  if (!extra) return param.detach().to(at::kFloat);
  const at::Tensor halves = param.detach().cpu().contiguous(), beside = extra->detach().cpu().contiguous();
  at::Tensor values = at::empty(halves.sizes(), at::kFloat);
  convert(param_stream(halves, beside, param_format_with(param.scalar_type(), extra->scalar_type())), stream_of(values),
          values.numel());
  return values.to(param.device());
}

// Writes values into a parameter; returns what its rounding left out, laid out as the step walks the parameter.
at::Tensor store_param(const at::Tensor& param, const at::Tensor& values, at::ScalarType extra_dtype) {
  const at::Tensor on_cpu = values.detach().cpu().to(at::kFloat).contiguous();
  at::Tensor halves = at::empty(on_cpu.sizes(), param.scalar_type()), beside = at::empty(on_cpu.sizes(), extra_dtype);
  convert(stream_of(on_cpu), param_stream(halves, beside, param_format_with(param.scalar_type(), extra_dtype)),
          on_cpu.numel());
  param.detach().copy_(halves);
  return empty_as_walked(param, extra_dtype).copy_(beside);
}

}  // namespace

void register_state(py::module_& m) {
  py::class_<Precision>(m, "Precision")
      .def(py::init([](int state_bits, int master_bits, int64_t min_8bit_size, const std::string& rounding) {
             return Precision{state_bits, master_bits, min_8bit_size, rounding_of(rounding)};
           }),
           py::kw_only(), py::arg("state_bits"), py::arg("master_bits"), py::arg("min_8bit_size"), py::arg("rounding"));
  // The rule's states by name, each with its kind (rules.h).
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
  // The shape of a state of this parameter; None: it has no such state.
  m.def(
      "optim_state_shape",
      [](const at::Tensor& param, int kind) {
        return state_sizes(*param.unsafeGetTensorImpl(), static_cast<StateKind>(kind));
      },
      py::arg("param"), py::arg("kind"));
  // The dtype that a state of this parameter must have; None: any floating one.
  m.def(
      "optim_state_dtype",
      [](const Precision& precision, const at::Tensor& param, int kind) {
        return state_dtype(precision, *param.unsafeGetTensorImpl(), static_cast<StateKind>(kind));
      },
      py::arg("precision"), py::arg("param"), py::arg("kind"));
  m.def(
      "optim_is_state_as",
      [](const at::Tensor& param, const at::Tensor& state, const std::optional<at::Tensor>& scales,
         std::optional<at::ScalarType> dtype) { return is_state_as(param, state, scales ? &*scales : nullptr, dtype); },
      py::arg("param"), py::arg("state"), py::arg("scales"), py::arg("dtype"));
  // Name and dtype of what the parameter has beside it, or None.
  m.def(
      "optim_param_extra",
      [](const Precision& precision, const at::Tensor& param) -> std::optional<std::pair<std::string, at::ScalarType>> {
        const auto extra = extra_of(param_format(precision, param.scalar_type()));
        if (!extra) return std::nullopt;
        return std::pair<std::string, at::ScalarType>(extra->name, extra->dtype);
      },
      py::arg("precision"), py::arg("param"));
  m.def("optim_load_state", &load_state, py::arg("state"), py::arg("scales"));
  m.def("optim_store_state", &store_state, py::arg("param"), py::arg("values"), py::arg("dtype"));
  m.def("optim_load_param", &load_param, py::arg("param"), py::arg("extra"));
  m.def("optim_store_param", &store_param, py::arg("param"), py::arg("values"), py::arg("dtype"));
  m.def("optim_extra_names", [] { return std::vector<std::string>(std::begin(kExtraNames), std::end(kExtraNames)); });
}

}  // namespace drivetrain::optim
