// Describes the companions of storage formats and allocates tensors; see storage_torch.h.
#include "formats/storage_torch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

namespace drivetrain::formats {

std::optional<Extra> extra_of(Format param_format) {
  switch (param_format) {
    case Format::kBFloat16Remainder16:
      return Extra{kExtraNames[0], at::kShort};
    case Format::kBFloat16Remainder8:
      return Extra{kExtraNames[0], at::kChar};
    case Format::kBFloat16Kahan:
      return Extra{kExtraNames[1], at::kBFloat16};
    case Format::kFloat16Kahan:
      return Extra{kExtraNames[1], at::kHalf};
    case Format::kFloat16Master:
      return Extra{kExtraNames[2], at::kFloat};
    default:
      return std::nullopt;
  }
}

at::Tensor empty_as_walked(const at::Tensor& like, at::ScalarType dtype) {
  const at::TensorOptions options = like.options().dtype(dtype);
  return is_walkable(like) ? at::empty_strided(like.sizes(), like.strides(), options)
                           : at::empty(like.sizes(), options);
}

}  // namespace drivetrain::formats
