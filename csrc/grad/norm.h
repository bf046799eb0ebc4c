// Declares the sum of squares of gradients, in one read: their 2-norm, and whether one is not finite. Needs no torch
// header.
#pragma once

#include <cstdint>
#include <vector>

#include "base/isa_namespace.h"
#include "formats/storage.h"
#include "formats/summation.h"

namespace drivetrain::grad {

// A gradient with dense memory.
struct Gradient {
  formats::TypedArray values;
  int64_t numel;
};

// Sums the squares of each chunk in double, in the order of summation.h. Devices, instruction sets and threads do not
// change the bits. The gradients must be in host memory.
std::vector<double> chunk_sums(const std::vector<Gradient>& gradients);
// Adds the sums of all chunks. The sum is not finite exactly if an element is not, or if a sum of float64 overflows.
double sum_of_chunks(const std::vector<double>& sums);
double sum_of_squares(const std::vector<Gradient>& gradients);

// Sums elements [begin, end), at most formats::kChunk of them. One copy per instruction set.
DT_PER_ISA(double sum_of_squares_cpu(const formats::TypedArray& values, int64_t begin, int64_t end))

}  // namespace drivetrain::grad
