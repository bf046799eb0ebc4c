// The node of autograd that accumulates a parameter's gradient, for whoever hooks on it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace drivetrain {

// To be kept as long as its hooks shall live: the parameter refers to its accumulator weakly, and without another
// reference both would go. (An intrusive pointer in some versions of torch, a shared one in others.)
inline std::shared_ptr<torch::autograd::Node> grad_accumulator_of(const at::Tensor& param) {
  const auto accumulator = torch::autograd::impl::grad_accumulator(param);
  return {accumulator.get(), [accumulator](torch::autograd::Node*) {}};
}

}  // namespace drivetrain
