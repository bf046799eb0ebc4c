// Bytes that kernels read, kept on their device between steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace drivetrain::optim {

// Uploaded again only where they have changed, through pinned memory: the host never waits. While a CUDA graph is
// captured they go into memory of their own, written by the graph itself and kept as long as this object lives:
// replays neither read what later steps upload nor write where those read.
class DeviceTable {
 public:
  // The copy on the device, for work that is enqueued on this stream of it.
  char* hold(const std::vector<char>& bytes, c10::Device device, void* stream);

 private:
  std::vector<char> bytes_;
  void* stream_ = nullptr;
  at::Tensor on_device_;
  std::vector<at::Tensor> captured_;
};

}  // namespace drivetrain::optim
