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

at::ScalarType marked_dtype(const at::Tensor& state, const at::Tensor* scales) {
  const at::ScalarType dtype = state.scalar_type();
  const bool is_packed = (dtype == at::kChar || dtype == at::kByte) && state.dim() == 1 && scales != nullptr &&
                         scales->scalar_type() == at::kFloat &&
                         scales->numel() == num_scales(Format::kSigned4, 2 * state.numel()) &&
                         scales->numel() > num_blocks(state.numel());
  return !is_packed ? dtype : dtype == at::kChar ? at::ScalarType::Int4 : at::ScalarType::UInt4;
}

at::Tensor empty_as_walked(const at::Tensor& like, at::ScalarType dtype, std::optional<at::Device> device) {
  const at::TensorOptions options = like.options().dtype(dtype).device(device.value_or(like.device()));
  return is_walkable(like) ? at::empty_strided(like.sizes(), like.strides(), options)
                           : at::empty(like.sizes(), options);
}

}  // namespace drivetrain::formats
