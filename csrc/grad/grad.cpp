// Registers norms, main gradients and fused weight gradients with Python.
#include "grad/grad.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "base/check.h"
#include "base/grad_accumulator.h"
#include "base/held_function.h"
#include "base/torch_text.h"
#include "formats/storage_torch.h"
#include "grad/deferral.h"
#include "grad/fuse_wgrad.h"
#include "grad/main_grads.h"
#include "grad/norm.h"
#include "grad/weight_grad.h"

namespace py = pybind11;

namespace drivetrain::grad {
namespace {

double sum_of_squares_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Gradient> gradients;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu() || !tensor.is_contiguous() || !formats::format_of(tensor.scalar_type())) {
      throw UserTypeError(text("tensors contains a tensor of ", tensor.scalar_type(), " with strides ",
                               tensor.strides(), " on ", tensor.device().str(),
                               ", expected contiguous floating tensors on cpu."));
    }
    gradients.push_back({formats::array_of(tensor), formats::real_numel(tensor)});
  }
  return sum_of_squares(gradients);
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
  m.def("watch_gradients", &watch_gradients, py::arg("params"));
  py::class_<Deferral, std::shared_ptr<Deferral>>(m, "Deferral")
      .def("were_finite", &Deferral::were_finite, no_gil())
      .def("set_finite", &Deferral::set_finite, no_gil());
  m.def("defer_gradients", &Deferral::make, py::arg("params"), py::arg("inv_scale"));
  m.def("deferrals_of", &Deferral::of, py::arg("params"), no_gil());
  m.def("deferred_norm", &Deferral::norm, py::arg("params"), py::arg("deferrals"), no_gil());
  m.def("multiply_deferred", &Deferral::multiply, py::arg("deferrals"), py::arg("factor"), no_gil());
  m.def("drop_deferred", &Deferral::drop, py::arg("params"), py::arg("zeroes"));
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
