// A linear layer's weight gradient, multiplied straight into where it is collected: nothing of its size in between.
// Where that would not pay, autograd's own product and its accumulation go on as without.
#pragma once

#include <ATen/core/Tensor.h>

namespace drivetrain::grad {

// The gradient is left^T * right, summed over tokens. Both [tokens, .], contiguous, of one dtype and device.
struct WeightGrad {
  at::Tensor left;
  at::Tensor right;

  bool is_on_cpu() const { return left.is_cpu(); }
};

// Whether it can be added to a tensor of that dtype, with 8 bits of remainder beside it or none, in at least the
// precision of a product that is rounded to its own dtype first and no slower. With a remainder: on the CPU alone.
bool can_add(const WeightGrad& weight_grad, at::ScalarType grad_dtype, bool has_residual);

// Whether this processor multiplies blocks of 16-bit values, as can_add() on the CPU needs for bfloat16.
bool has_block_products();

// grad += left^T * right, or grad = where it starts. grad: contiguous, of the product's shape and device; residual:
// undefined, or int8 of as many elements beside a bfloat16 grad.
void add(const WeightGrad& weight_grad, const at::Tensor& grad, const at::Tensor& residual, bool starts);

}  // namespace drivetrain::grad
