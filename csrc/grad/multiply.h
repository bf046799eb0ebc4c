// Declares passes over gradients in host memory: multiplying, searching for infs and NaNs, zeroing. Needs no torch
// header.
#pragma once

#include <vector>

#include "formats/factors.h"
#include "grad/norm.h"

namespace drivetrain::grad {

// Multiplies gradients in place. Returns whether all elements were finite before.
bool multiply(const std::vector<Gradient>& gradients, const formats::Factors& factors);

bool all_finite(const std::vector<Gradient>& gradients);

void zero(const std::vector<Gradient>& gradients);

// Multiplies elements [begin, end), which multiplies nothing without factors, and returns whether all were finite
// before. One copy per instruction set.
namespace baseline {
bool multiply_cpu(const formats::TypedArray& values, int64_t begin, int64_t end, const formats::Factors& factors);
}
namespace avx2 {
bool multiply_cpu(const formats::TypedArray& values, int64_t begin, int64_t end, const formats::Factors& factors);
}
namespace avx512 {
bool multiply_cpu(const formats::TypedArray& values, int64_t begin, int64_t end, const formats::Factors& factors);
}

}  // namespace drivetrain::grad
