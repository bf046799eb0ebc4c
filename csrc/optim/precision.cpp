// Derives storage formats from options; see precision.h.
#include "optim/precision.h"

#include <algorithm>

#include "base/check.h"
#include "base/torch_text.h"

namespace drivetrain::optim {
namespace {

// Spells the option as the user did.
std::string state_bits_text(const Precision& precision) {
  return precision.float8 ? "state_bits='fp8'" : text("state_bits=", precision.state_bits);
}

bool is_half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

}  // namespace

std::string why_not(const Precision& precision, at::ScalarType dtype) {
  if (precision.master_bits == 24 && dtype == at::kHalf) {
    return text("master_bits=24 needs a bfloat16 parameter, this is ", dtype,
                ": use master_bits=32, which keeps a float32 copy");
  }
  const bool is_wide = c10::toRealValueType(dtype) == at::kDouble;
  if (is_wide && precision.state_bits != 0) {
    return text(state_bits_text(precision), " is not for ", dtype,
                " parameters: put them into a group of their own with state_bits=None");
  }
  if (c10::isComplexType(dtype) && precision.state_bits != 0 && precision.state_bits != 32) {
    return text(state_bits_text(precision), " needs real parameters, this is ", dtype,
                ": put complex ones into a group of their own with state_bits=None");
  }
  return "";
}

Format param_format(const Precision& precision, at::ScalarType dtype) {
  const bool is_bfloat16 = dtype == at::kBFloat16;
  if (is_half(dtype) && precision.master_bits != 0) {
    if (!is_bfloat16) return Format::kFloat16Master;
    return precision.master_bits == 32 ? Format::kBFloat16Remainder16 : Format::kBFloat16Remainder8;
  }
  if (is_half(dtype) && precision.rounding == Rounding::kStochastic) {
    return is_bfloat16 ? Format::kBFloat16Stochastic : Format::kFloat16Stochastic;
  }
  if (is_half(dtype) && precision.rounding == Rounding::kKahan) {
    return is_bfloat16 ? Format::kBFloat16Kahan : Format::kFloat16Kahan;
  }
  return *format_of(dtype);
}

std::optional<std::vector<int64_t>> state_sizes(const c10::TensorImpl& param, StateKind kind) {
  std::vector<int64_t> sizes = param.sizes().vec();
  const size_t dims = sizes.size();
  if ((kind == StateKind::kRowMeans || kind == StateKind::kColumnMeans) && dims < 2) return std::nullopt;
  if (kind == StateKind::kSquaredOfVector && dims >= 2) return std::nullopt;
  if (kind == StateKind::kRowMeans) sizes[dims - 1] = 1;
  if (kind == StateKind::kColumnMeans) sizes[dims - 2] = 1;
  return sizes;
}

std::optional<BlockDtypes> block_dtypes(StateKind kind) {
  if (kind == StateKind::kMean) return BlockDtypes{at::kChar, at::kFloat8_e4m3fn, at::ScalarType::Int4};
  if (kind == StateKind::kSquared) return BlockDtypes{at::kByte, at::kFloat8_e5m2, at::ScalarType::UInt4};
  return std::nullopt;
}

bool keeps_32_bits(const Precision& precision, const c10::TensorImpl& param) {
  const bool is_vector = param.dim() < 2 && param.numel() <= kMaxVector;
  // So few 4-bit codes could be 8-bit ones by the number of their scales.
  const int64_t least =
      precision.state_bits == 4 ? std::max<int64_t>(precision.min_8bit_size, kBlock) : precision.min_8bit_size;
  return (precision.state_bits == 8 || precision.state_bits == 4) && (is_vector || param.numel() < least);
}

std::optional<at::ScalarType> state_dtype(const Precision& precision, const c10::TensorImpl& param, StateKind kind) {
  switch (precision.state_bits) {
    case 0:
      // Squares of gradients below 3e-3 are 0 in float16. Without options states are as torch's.
      if (param.dtype().toScalarType() == at::kHalf && !precision.is_default()) return at::kFloat;
      return std::nullopt;
    case 16:
      return at::kBFloat16;
    case 8:
    case 4:
      if (keeps_32_bits(precision, param)) return at::kFloat;
      if (const auto dtypes = block_dtypes(kind)) {
        return precision.state_bits == 4 ? dtypes->codes4 : precision.float8 ? dtypes->float8 : dtypes->codes;
      }
      return at::kFloat;
    default:
      return c10::isComplexType(param.dtype().toScalarType()) ? at::kComplexFloat : at::kFloat;
  }
}

}  // namespace drivetrain::optim
