// Converts torch tensors to typed arrays (storage.h), and allocates tensors for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "formats/storage.h"

namespace drivetrain::formats {

// Returns the format of each real number, or none for dtypes without kernels.
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

// Returns the dtype of real numbers in a format that format_of() gives.
inline at::ScalarType dtype_of(Format format) {
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16, at::kHalf}) {
    if (format_of(dtype) == format) return dtype;
  }
  return at::kFloat;
}

// Returns whether kernels can read the tensor's elements in memory order: dense, and without a lazy conjugation or
// negation.
inline bool is_walkable(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

// Counts the real numbers of a tensor; a complex number has two.
inline int64_t real_numel(const at::Tensor& tensor) { return tensor.numel() * (tensor.is_complex() ? 2 : 1); }

// Describes the tensor's memory; its dtype must have a format.
inline TypedArray array_of(const at::Tensor& tensor) { return {tensor.data_ptr(), *format_of(tensor.scalar_type())}; }

// Describes the companion tensor of a format with `extra`: its name in the optimizer's state and its dtype. Other
// formats have none.
struct Extra {
  const char* name;
  at::ScalarType dtype;
};
std::optional<Extra> extra_of(Format param_format);
constexpr const char* kExtraNames[] = {"param_remainder", "param_compensation", "param_master"};

// Returns the format of a state in blocks by the dtype that marks it, or none for other dtypes. A 4-bit state, marked
// int4 or uint4, is a vector of int8 or uint8.
inline std::optional<Format> block_format_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar:
      return Format::kSigned8;
    case at::kByte:
      return Format::kSquared8;
    case at::kFloat8_e4m3fn:
      return Format::kSignedFloat8;
    case at::kFloat8_e5m2:
      return Format::kSquaredFloat8;
    case at::ScalarType::Int4:
      return Format::kSigned4;
    case at::ScalarType::UInt4:
      return Format::kSquared4;
    default:
      return std::nullopt;
  }
}
inline bool is_block_dtype(at::ScalarType dtype) { return block_format_of(dtype).has_value(); }
inline int64_t num_blocks(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// Returns the dtype of a state's tensor by the dtype that marks its format.
inline at::ScalarType stored_dtype(at::ScalarType mark) {
  return mark == at::ScalarType::Int4 ? at::kChar : mark == at::ScalarType::UInt4 ? at::kByte : mark;
}

inline bool is_packed(at::ScalarType mark) { return stored_dtype(mark) != mark; }

// Returns the dtype that marks a state's format. 4-bit codes have four times as many scales per byte as 8-bit codes.
at::ScalarType marked_dtype(const at::Tensor& state, const at::Tensor* scales);

// Allocates a tensor with the strides of `like`, or a contiguous one if `like` is not dense. Without a device it takes
// the one of `like`.
at::Tensor empty_as_walked(const at::Tensor& like, at::ScalarType dtype, std::optional<at::Device> device = {});

}  // namespace drivetrain::formats
