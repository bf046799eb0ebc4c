// Adds up what a step has measured, and copies it from a GPU to the host; see measured.h.
#include "optim/measured.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/stream_order.h"
#include "formats/total.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

// Starts a copy to pinned memory.
at::Tensor to_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  at::Tensor result = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
  return result.copy_(tensor, /*non_blocking=*/true);
}

}  // namespace

Measured::Measured(const Batch& batch) : written_of_(batch.written_of) {
  for (const ParamJob& param : batch.params) first_chunks_.push_back(param.first_chunk);
  first_chunks_.push_back(batch.num_chunks);
  const int64_t bytes = batch.num_chunks * static_cast<int64_t>(sizeof(ChunkStatistics));
  chunks_ = at::zeros({bytes}, at::TensorOptions(at::kByte).device(batch.device));
}

void Measured::leave(const std::variant<double, at::Tensor>& scale, const at::Tensor& grad_scaling) {
  const c10::Device device = chunks_.device();
  const at::Tensor* const of_device = std::get_if<at::Tensor>(&scale);
  scale_ = of_device != nullptr ? to_host(*of_device) : at::scalar_tensor(std::get<double>(scale), at::kDouble);
  grad_scaling_ = to_host(grad_scaling);
  chunks_ = to_host(chunks_);
  if (!device.is_cpu()) copied_.emplace(device).record(*stream_on(device));
}

void Measured::wait() {
  if (!copied_) return;
  const py::gil_scoped_release no_gil;
  copied_->synchronize();
}

bool Measured::skipped() {
  wait();
  return grad_scaling_.defined() && static_cast<const GradScaling*>(grad_scaling_.const_data_ptr())->skips;
}

py::tuple Measured::record(size_t index) {
  wait();
  formats::SumOfChunks grad, update, values;
  ChunkStatistics sums;
  const ChunkStatistics* const all = chunks();
  std::for_each(all + first_chunks_.at(index), all + first_chunks_.at(index + 1), [&](const ChunkStatistics& chunk) {
    grad.add(chunk.grad);
    update.add(chunk.update);
    values.add(chunk.param);
    sums.largest = std::max(sums.largest, chunk.largest);
    sums.not_finite += chunk.not_finite;
    sums.changed += chunk.changed;
    sums.lost += chunk.lost;
  });
  const auto scale = scale_.item<double>();
  return py::make_tuple(std::sqrt(grad.get()) / scale, std::sqrt(update.get()), std::sqrt(values.get()),
                        sums.largest / scale, sums.not_finite, sums.changed, sums.lost);
}

void register_measured(py::module_& m) {
  py::class_<Measured, std::shared_ptr<Measured>>(m, "Measured")
      .def_property_readonly("has_arrived", &Measured::has_arrived)
      .def_property_readonly("skipped", &Measured::skipped)
      .def("record", &Measured::record, py::arg("index"));
}

}  // namespace drivetrain::optim
