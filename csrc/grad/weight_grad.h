// Multiplies a linear layer's weight gradient directly into the gradient buffer, without a temporary of its size. Where
// that would be slower, autograd's product and accumulation are used.
#pragma once

#include <ATen/core/Tensor.h>

namespace drivetrain::grad {

// The gradient is left^T * right, summed over tokens. Both are [tokens, .], contiguous, and share dtype and device.
struct WeightGrad {
  at::Tensor left;
  at::Tensor right;

  bool is_on_cpu() const { return left.is_cpu(); }
};

// Returns whether the gradient can be added to a tensor of that dtype, with or without 8 bits of remainder. The sum
// must be as precise as with a product rounded to its own dtype first, and no slower. A remainder is supported on the
// CPU only.
bool can_add(const WeightGrad& weight_grad, at::ScalarType grad_dtype, bool has_residual);

// Returns whether this processor multiplies blocks of 16-bit values, which can_add() needs for bfloat16 on the CPU.
bool has_block_products();

// Computes grad += left^T * right, or grad = left^T * right if `starts`. `grad` is contiguous and has the product's
// shape and device. `residual` is undefined, or int8 with as many elements for a bfloat16 grad.
void add(const WeightGrad& weight_grad, const at::Tensor& grad, const at::Tensor& residual, bool starts);

}  // namespace drivetrain::grad
