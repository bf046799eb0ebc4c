// Declares the statistics of a step's parameters, which arrive from a GPU after the step.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "base/device_event.h"
#include "optim/batch.h"

namespace drivetrain::optim {

// The statistics of a batch's parameters.
class Measured {
 public:
  explicit Measured(const Batch& batch);

  ChunkStatistics* chunks() { return static_cast<ChunkStatistics*>(chunks_.data_ptr()); }

  // Starts the copy to the host once the step is enqueued. `scale` divides gradients. `grad_scaling` is on the device
  // if only the device knows whether the step was skipped, else undefined.
  void leave(const std::variant<double, at::Tensor>& scale, const at::Tensor& grad_scaling);

  bool has_arrived() const { return !copied_ || copied_->query(); }
  // These wait for the copy. A record's elements are described by ParameterStatistics of optim/statistics.py.
  bool skipped();
  pybind11::tuple record(size_t index);

  const std::vector<uint32_t>& written_of() const { return written_of_; }

 private:
  void wait();

  const std::vector<uint32_t> written_of_;
  std::vector<int64_t> first_chunks_;  // of the parameters, and the number of all chunks
  at::Tensor chunks_, scale_, grad_scaling_;
  std::optional<DeviceEvent> copied_;
};

void register_measured(pybind11::module_& m);

}  // namespace drivetrain::optim
