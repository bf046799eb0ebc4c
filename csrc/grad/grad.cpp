// The gradient sweeps' boundary to Python.
#include "grad/grad.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/check.h"
#include "grad/norm.h"
#include "grad/reduced_norm.h"
#include "optim/storage_torch.h"

namespace py = pybind11;

namespace drivetrain::grad {
namespace {

double sum_of_squares_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Gradient> gradients;
  Gradients impls;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu() || !tensor.is_contiguous() || !optim::format_of(tensor.scalar_type())) {
      throw UserTypeError(text("sum_of_squares takes contiguous floating tensors on cpu and got ", tensor.scalar_type(),
                               " of strides ", tensor.strides(), " on ", tensor.device().str()));
    }
    gradients.push_back({optim::stream_of(tensor), optim::real_numel(tensor)});
    impls.push_back(tensor.unsafeGetTensorImpl());
  }
  if (const std::optional<double> known = known_sum_of_squares(impls)) return *known;
  return sum_of_squares(gradients);
}

}  // namespace

void register_grad(py::module_& m) {
  m.def("sum_of_squares", &sum_of_squares_of, py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace drivetrain::grad
