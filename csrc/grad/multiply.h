// Declares the pass over gradients in host memory that multiplies them and finds infs and NaNs. Needs no torch header.
#pragma once

#include <vector>

#include "grad/norm.h"

namespace drivetrain::grad {

// Multiplies gradients in place. Returns whether all elements were finite before.
bool multiply(const std::vector<Gradient>& gradients, double factor);

// Multiplies elements [begin, end), and returns whether all were finite before. One copy per instruction set.
namespace baseline {
bool multiply_cpu(const formats::TypedArray& values, int64_t begin, int64_t end, double factor);
}
namespace avx2 {
bool multiply_cpu(const formats::TypedArray& values, int64_t begin, int64_t end, double factor);
}
namespace avx512 {
bool multiply_cpu(const formats::TypedArray& values, int64_t begin, int64_t end, double factor);
}

}  // namespace drivetrain::grad
