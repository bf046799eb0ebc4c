// Registers norms, main gradients and fused weight gradients with Python.
#include "grad/grad.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/grad_accumulator.h"
#include "base/held_function.h"
#include "base/plain_keys.h"
#include "base/torch_text.h"
#include "formats/storage_torch.h"
#include "grad/fuse_wgrad.h"
#include "grad/main_grads.h"
#include "grad/multiply.h"
#include "grad/norm.h"
#include "grad/torch_norm.h"
#include "grad/weight_grad.h"

namespace py = pybind11;

namespace drivetrain::grad {
namespace {

std::vector<Gradient> gradients_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Gradient> gradients;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu() || !tensor.is_contiguous() || !formats::format_of(tensor.scalar_type())) {
      throw UserTypeError(text("tensors contains a tensor of ", tensor.scalar_type(), " with strides ",
                               tensor.strides(), " on ", tensor.device().str(),
                               ", expected contiguous floating tensors on cpu."));
    }
    gradients.push_back({formats::array_of(tensor), formats::real_numel(tensor)});
  }
  return gradients;
}

double sum_of_squares_of(const std::vector<at::Tensor>& tensors) { return sum_of_squares(gradients_of(tensors)); }

// Returns whether passes of native code may replace torch's operations: nothing observes these, and the gradients are
// dense tensors of the host.
bool are_plain(const std::vector<at::Tensor>& grads) {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         std::all_of(grads.begin(), grads.end(), [](const at::Tensor& grad) {
           const c10::TensorImpl& impl = *grad.unsafeGetTensorImpl();
           return has_plain_keys(impl) && impl.device().is_cpu() && impl.layout() == c10::kStrided &&
                  impl.has_storage() && formats::format_of(grad.scalar_type()) && !grad.is_complex() &&
                  !grad.is_inference() && !grad.requires_grad() && impl.is_non_overlapping_and_dense();
         });
}

// Returns the 2-norm of all gradients with torch's bits; nothing if the gradients are not plain or of several dtypes.
std::optional<at::Tensor> clip_norm(const std::vector<at::Tensor>& grads) {
  const auto is_as_first = [&](const at::Tensor& grad) { return grad.scalar_type() == grads.front().scalar_type(); };
  if (grads.empty() || !are_plain(grads) || !std::all_of(grads.begin(), grads.end(), is_as_first)) return std::nullopt;
  const at::NoGradGuard no_grad;
  return at::linalg_vector_norm(torch_norms(grads), 2);
}

// Returns whether two gradients share memory, which torch multiplies twice.
bool do_overlap(const std::vector<at::Tensor>& grads) {
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const at::Tensor& grad : grads) {
    const char* const begin = static_cast<const char*>(grad.const_data_ptr());
    if (grad.numel() > 0) ranges.emplace_back(begin, begin + grad.nbytes());
  }
  std::sort(ranges.begin(), ranges.end());
  return std::adjacent_find(ranges.begin(), ranges.end(),
                            [](const auto& a, const auto& b) { return b.first < a.second; }) != ranges.end();
}

// Multiplies gradients in place, which increments no version, and returns whether all were finite before. Returns
// nothing, and does nothing, if they are not plain or share memory.
std::optional<bool> multiply_gradients(const std::vector<at::Tensor>& grads, double factor) {
  if (!are_plain(grads) || do_overlap(grads)) return std::nullopt;
  std::vector<Gradient> gradients;
  for (const at::Tensor& grad : grads) {
    if (grad.numel() > 0) gradients.push_back({formats::array_of(grad), grad.numel()});
  }
  return multiply(gradients, factor);
}

// Wraps the Python callback was_added(index).
std::shared_ptr<MainGrads> make_main_grads(std::vector<at::Tensor> params, std::vector<at::Tensor> main,
                                           py::function was_added) {
  return MainGrads::make(std::move(params), std::move(main), [held = hold(std::move(was_added))](size_t index) {
    const py::gil_scoped_acquire gil;
    return (*held)(index).cast<bool>();
  });
}

}  // namespace

void register_grad(py::module_& m) {
  using no_gil = py::call_guard<py::gil_scoped_release>;  // A hook that holds its mutex never waits for the GIL.
  m.def("has_block_products", &has_block_products);
  m.def("sum_of_squares", &sum_of_squares_of, py::arg("tensors"), no_gil());
  m.def("clip_norm", &clip_norm, py::arg("grads"), no_gil());
  m.def("multiply_gradients", &multiply_gradients, py::arg("grads"), py::arg("factor"), no_gil());
  // Python hooks on saved tensors may raise, as activation checkpointing's hooks do. torch's errors must keep torch's
  // types.
  m.def("fused_linear", torch::wrap_pybind_function_no_gil(&fused_linear), py::arg("input"), py::arg("weight"),
        py::arg("bias"), py::arg("is_conv1d"));
  // Counts the post hooks of a leaf's accumulator: hooks of DistributedDataParallel's reducers, drivetrain's or
  // torch's.
  m.def(
      "num_accumulator_hooks", [](const at::Tensor& param) { return grad_accumulator_of(param)->post_hooks().size(); },
      py::arg("param"));
  py::class_<MainGrads, std::shared_ptr<MainGrads>>(m, "MainGrads")
      .def(py::init(&make_main_grads), py::arg("params"), py::arg("main"), py::arg("was_added"))
      .def("move_to", &MainGrads::move_to, py::arg("index"), py::arg("main"), no_gil())
      .def("residual", &MainGrads::residual, py::arg("index"), no_gil());
}

}  // namespace drivetrain::grad
