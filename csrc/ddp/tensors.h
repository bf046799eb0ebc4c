// What the reducer's files need of torch beside its own functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <string>

namespace drivetrain::ddp {

// Autograd carries errors from hooks to Python: only torch's own kinds keep their kind on the way.
[[noreturn]] inline void throw_unsupported(const std::string& message) {
  C10_THROW_ERROR(NotImplementedError, message);
}
[[noreturn]] inline void throw_value_error(const std::string& message) { C10_THROW_ERROR(ValueError, message); }
[[noreturn]] inline void throw_type_error(const std::string& message) { C10_THROW_ERROR(TypeError, message); }

// A factor as a tensor: the overloads that take a number make a temporary as large as the gradient.
inline at::Tensor as_scalar(double value) {
  at::Tensor scalar = at::scalar_tensor(value, at::kDouble);
  scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
  return scalar;
}

// As transports take it.
inline at::Tensor as_real(const at::Tensor& flat) {
  return flat.is_complex() ? at::view_as_real(flat).flatten() : flat;
}

// An empty sparse gradient, sparse in its first dimension as an Embedding's is.
inline at::Tensor no_rows(const at::Tensor& param) {
  const auto options = at::TensorOptions(param.scalar_type()).device(param.device()).layout(at::kSparse);
  return at::_sparse_coo_tensor_with_dims(1, param.dim() - 1, param.sizes(), options);
}

}  // namespace drivetrain::ddp
