// A torch tensor's values as a array of storage.h's.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "formats/storage.h"

namespace drivetrain::formats {

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
inline TypedArray array_of(const at::Tensor& tensor) { return {tensor.data_ptr(), *format_of(tensor.scalar_type())}; }

// The dtype of what such a format has in `extra`, and its name in the optimizer's state; none for other formats.
struct Extra {
  const char* name;
  at::ScalarType dtype;
};
std::optional<Extra> extra_of(Format param_format);
constexpr const char* kExtraNames[] = {"param_remainder", "param_compensation", "param_master"};

inline bool is_block_dtype(at::ScalarType dtype) { return dtype == at::kChar || dtype == at::kByte; }
inline int64_t num_blocks(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// A tensor laid out in memory as `like` is walked, or contiguously if that cannot be walked as it lies.
at::Tensor empty_as_walked(const at::Tensor& like, at::ScalarType dtype);

}  // namespace drivetrain::formats
