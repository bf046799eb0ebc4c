// What a parameter group asks of its storages, and the formats that follow for one parameter and its states.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "formats/storage_torch.h"

namespace drivetrain::optim {

using namespace formats;

enum class Rounding : uint8_t { kNearest, kStochastic, kKahan };

// A group's options, by the names that the Python classes give them.
struct Precision {
  int state_bits = 0;   // 32, 16 or 8; 0: states stay as they are
  int master_bits = 0;  // 32 or 24: of a 16-bit parameter, kept beside it; 0: none
  int64_t min_8bit_size = 4096;
  Rounding rounding = Rounding::kNearest;

  bool is_default() const { return state_bits == 0 && master_bits == 0 && rounding == Rounding::kNearest; }
};

// Why these options and this dtype do not go together; empty if they do.
std::string why_not(const Precision& precision, at::ScalarType dtype);

// How the parameter itself lives: its dtype's own format, or one with something in `extra`.
Format param_format(const Precision& precision, at::ScalarType dtype);

// What a state is, which says its shape and what it may be kept in.
enum class StateKind : uint8_t {
  kMean,
  kSquared,  // a mean or sum of squares: in 8 bits, those need other codes
  // Of squares, over the last dimension or the one before it (of size 1 there), of parameters that have both; and what
  // others have instead.
  kRowMeans,
  kColumnMeans,
  kSquaredOfVector,
};

// The sizes of a state of this kind; none: a parameter of such a shape has no such state.
std::optional<std::vector<int64_t>> state_sizes(const c10::TensorImpl& param, StateKind kind);

// The dtype that a state of this parameter must have; none: any floating one. int8 and uint8 stand for kSigned8 and
// kSquared8.
std::optional<at::ScalarType> state_dtype(const Precision& precision, const c10::TensorImpl& param, StateKind kind);

}  // namespace drivetrain::optim
