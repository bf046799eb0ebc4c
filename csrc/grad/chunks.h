// Cuts gradients into the chunks that threads work on. Needs no torch header.
#pragma once

#include <algorithm>
#include <vector>

#include "formats/summation.h"
#include "grad/norm.h"

namespace drivetrain::grad {

// Elements [begin, end) of an array.
struct GradientChunk {
  const formats::TypedArray* values;
  int64_t begin, end;
};

constexpr int64_t kChunksPerThread = 8;  // at least

// Returns chunks of at most formats::kChunk elements, in the gradients' order.
inline std::vector<GradientChunk> chunks_of(const std::vector<Gradient>& gradients) {
  std::vector<GradientChunk> chunks;
  for (const Gradient& gradient : gradients) {
    for (int64_t begin = 0; begin < gradient.numel; begin += formats::kChunk) {
      chunks.push_back({&gradient.values, begin, std::min(begin + formats::kChunk, gradient.numel)});
    }
  }
  return chunks;
}

}  // namespace drivetrain::grad
