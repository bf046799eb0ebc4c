// Declares a group's storage options, and the storage formats that follow for one parameter and its states.
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

// A group's options, by the names of the Python classes.
struct Precision {
  int state_bits = 0;   // 32, 16, 8 or 4; 0 keeps states as they are
  bool float8 = false;  // 8 bits are float8 numbers instead of codes
  int master_bits = 0;  // 32 or 24 bits of 16-bit parameters; 0 keeps none
  int64_t min_8bit_size = 4096;
  Rounding rounding = Rounding::kNearest;

  bool operator==(const Precision&) const = default;
  bool is_default() const { return state_bits == 0 && master_bits == 0 && rounding == Rounding::kNearest; }
};

// Returns why these options and this dtype do not go together; empty if they do.
std::string why_not(const Precision& precision, at::ScalarType dtype);

// Returns the parameter's storage format: its dtype's own, or one with `extra`.
Format param_format(const Precision& precision, at::ScalarType dtype);

// The kind of a state, which determines its shape and the formats that it may have.
enum class StateKind : uint8_t {
  kMean,
  kSquared,  // a mean or sum of squares, which has its own 8-bit codes
  // Adafactor's factored second moment (2-D and up) and its unfactored form (otherwise). The factors reduce the last
  // dimension and the one before it, and have size 1 there.
  kRowMeans,
  kColumnMeans,
  kSquaredOfVector,
};

// Returns the sizes of a state of this kind, or none if a parameter of this shape has no such state.
std::optional<std::vector<int64_t>> state_sizes(const c10::TensorImpl& param, StateKind kind);

// The dtypes that mark the formats of a state in blocks.
struct BlockDtypes {
  at::ScalarType codes;
  at::ScalarType float8;
  at::ScalarType codes4;
};

// Returns the dtypes of a state's formats in blocks, or none if a state of this kind has no such format.
std::optional<BlockDtypes> block_dtypes(StateKind kind);

// The most elements of a vector that keeps 32-bit states under state_bits=8 or 4. Biases and norms save nothing and are
// more sensitive; a longer vector is a flattened model.
constexpr int64_t kMaxVector = 65536;

// Returns whether the parameter is so small that its states keep 32 bits although the group asks for 8
// or 4.
bool keeps_32_bits(const Precision& precision, const c10::TensorImpl& param);

// Returns the dtype that marks the format of a state of this parameter, or none if any floating one will do.
std::optional<at::ScalarType> state_dtype(const Precision& precision, const c10::TensorImpl& param, StateKind kind);

}  // namespace drivetrain::optim
