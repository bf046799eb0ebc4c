// A checksum of parameters, by which ranks compare their replicas.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace drivetrain::ddp {

// 64 bits over the tensors' values in order: int64 [], on the first tensor's device. On the CPU every bit of every
// value counts; elsewhere the sum of the values' bit patterns does, so that an exchange of two values within one tensor
// goes unseen. The host waits for no device.
at::Tensor hash_of(const std::vector<at::Tensor>& tensors);

}  // namespace drivetrain::ddp
