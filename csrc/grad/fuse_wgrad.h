// Linear layers whose backward adds the weight's gradient to where it is collected, by one product and without a
// gradient of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "grad/weight_grad.h"

namespace drivetrain::grad {

// A hook on a parameter's accumulator that collects the gradient somewhere else than in .grad alone.
class KeepsGradient {
 public:
  virtual ~KeepsGradient() = default;
  // Whether it has been added; if not, autograd is to bring it.
  virtual bool add(const WeightGrad& weight_grad) = 0;
};

// One that knows where .grad is going to lie.
class KnowsPlace {
 public:
  virtual ~KnowsPlace() = default;
  // Undefined: nowhere.
  virtual at::Tensor place() = 0;
};

// input * weight^T + bias, of a weight [outputs, inputs]; is_conv1d: input * weight + bias, of one [inputs, outputs],
// as Hugging Face's Conv1D has it. Differentiable any number of times, under autocast too. The weight's gradient is
// added to .grad, in the precision of that, where nobody is to see it before; else autograd brings it as ever.
at::Tensor fused_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        bool is_conv1d);

}  // namespace drivetrain::grad
