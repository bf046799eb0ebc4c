// Declares linear layers whose backward adds the weight gradient to the gradient buffer with one product, without a
// gradient tensor of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "grad/weight_grad.h"

namespace drivetrain::grad {

// A hook on a parameter's accumulator that collects the gradient elsewhere than in .grad alone.
class KeepsGradient {
 public:
  virtual ~KeepsGradient() = default;
  // Adds the gradient. Returns false if autograd must add it.
  virtual bool add(const WeightGrad& weight_grad) = 0;
};

// A hook that has the memory of the future .grad.
class HasGradientView {
 public:
  virtual ~HasGradientView() = default;
  // Returns an undefined tensor if there is no such memory.
  virtual at::Tensor gradient_view() = 0;
};

// Computes input * weight^T + bias for a weight [outputs, inputs]. With is_conv1d it computes input * weight + bias for
// a weight [inputs, outputs], as Hugging Face's Conv1D. Supports higher-order gradients and autocast. Backward adds the
// weight gradient to .grad, in the precision of .grad, unless other code must see it first; then autograd accumulates
// it.
at::Tensor fused_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        bool is_conv1d);

}  // namespace drivetrain::grad
