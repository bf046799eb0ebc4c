// Provides small tensor helpers for the reducer.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>

namespace drivetrain::ddp {

// Returns a factor as a tensor. The overloads that take a number allocate a temporary as large as the gradient.
inline at::Tensor as_scalar(double value) {
  at::Tensor scalar = at::scalar_tensor(value, at::kDouble);
  scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
  return scalar;
}

// Returns complex values as pairs of real ones, which transports require.
inline at::Tensor as_real(const at::Tensor& flat) {
  return flat.is_complex() ? at::view_as_real(flat).flatten() : flat;
}

// Returns an empty sparse gradient, sparse in its first dimension as an Embedding's.
inline at::Tensor no_rows(const at::Tensor& param) {
  const auto options = at::TensorOptions(param.scalar_type()).device(param.device()).layout(at::kSparse);
  return at::_sparse_coo_tensor_with_dims(1, param.dim() - 1, param.sizes(), options);
}

}  // namespace drivetrain::ddp
