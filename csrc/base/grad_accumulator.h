// Declares access to the autograd node that accumulates a parameter's gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace drivetrain {

// Keep the result while hooks on it are needed: the parameter refers to its accumulator weakly, and the accumulator
// owns its hooks. torch returns an intrusive pointer in some versions and a shared pointer in others.
inline std::shared_ptr<torch::autograd::Node> grad_accumulator_of(const at::Tensor& param) {
  const auto accumulator = torch::autograd::impl::grad_accumulator(param);
  return {accumulator.get(), [accumulator](torch::autograd::Node*) {}};
}

}  // namespace drivetrain
