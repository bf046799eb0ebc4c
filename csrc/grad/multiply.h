// Declares the pass over gradients in host memory that multiplies them and finds infs and NaNs. Needs no torch header.
#pragma once

#include <vector>

#include "base/isa_namespace.h"
#include "grad/norm.h"

namespace drivetrain::grad {

// Multiplies gradients in place. Returns whether all elements were finite before.
bool multiply(const std::vector<Gradient>& gradients, double factor);

// Multiplies elements [begin, end), and returns whether all were finite before. One copy per instruction set.
DT_PER_ISA(bool multiply_cpu(const formats::TypedArray& values, int64_t begin, int64_t end, double factor))

}  // namespace drivetrain::grad
