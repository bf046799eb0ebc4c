// A torch tensor's values as a stream of storage.h's.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "formats/storage.h"

namespace drivetrain::optim {

// Of each real number; none: no floating type that kernels know.
inline std::optional<Format> format_of(at::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kFloat:
      return Format::kFloat32;
    case at::kDouble:
      return Format::kFloat64;
    case at::kBFloat16:
      return Format::kBFloat16;
    case at::kHalf:
      return Format::kFloat16;
    default:
      return std::nullopt;
  }
}

// Whether it can be walked in the order in which it lies in memory, and every element is what its bytes say.
inline bool is_walkable(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

// Complex numbers are pairs of real ones.
inline int64_t real_numel(const at::Tensor& tensor) { return tensor.numel() * (tensor.is_complex() ? 2 : 1); }

// From the tensor's first element on; it must have a format.
inline Stream stream_of(const at::Tensor& tensor) { return {tensor.data_ptr(), *format_of(tensor.scalar_type())}; }

}  // namespace drivetrain::optim
