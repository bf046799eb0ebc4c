// The sum of squares of gradients in one read: their 2-norm, and whether any is not finite. No torch header.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/storage.h"
#include "formats/summation.h"

namespace drivetrain::grad {

// One gradient; its elements may be walked from the first to the last.
struct Gradient {
  formats::TypedArray values;
  int64_t numel;
};

// In double, in the order of summation.h: the same bits whatever the device, the instruction set and the number of
// threads. Not finite exactly if an element is not (float64: or if the sum overflows). The gradients must lie in this
// machine's memory.
double sum_of_squares(const std::vector<Gradient>& gradients);

// Elements [begin, end), at most formats::kChunk of them. One copy per instruction set.
namespace baseline {
double sum_of_squares_cpu(const formats::TypedArray& values, int64_t begin, int64_t end);
}
namespace avx2 {
double sum_of_squares_cpu(const formats::TypedArray& values, int64_t begin, int64_t end);
}
namespace avx512 {
double sum_of_squares_cpu(const formats::TypedArray& values, int64_t begin, int64_t end);
}

}  // namespace drivetrain::grad
