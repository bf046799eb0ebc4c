// The sum of squares of gradients in one read: their 2-norm, and whether any is not finite. No torch header.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/storage.h"
#include "formats/summation.h"

namespace drivetrain::optim {
struct ParamJob;
}

namespace drivetrain::grad {

// One gradient; its elements may be walked from the first to the last.
struct Gradient {
  optim::Stream values;
  int64_t numel;
};

// In double, in the order of summation.h: the same bits whatever the device, the instruction set and the number of
// threads. Not finite exactly if an element is not (float64: or if the sum overflows). The gradients must lie in this
// machine's memory.
double sum_of_squares(const std::vector<Gradient>& gradients);

// Elements [begin, end), at most kChunk of them. One copy per instruction set.
namespace baseline {
double sum_of_squares_cpu(const optim::Stream& values, int64_t begin, int64_t end);
}
namespace avx2 {
double sum_of_squares_cpu(const optim::Stream& values, int64_t begin, int64_t end);
}
namespace avx512 {
double sum_of_squares_cpu(const optim::Stream& values, int64_t begin, int64_t end);
}

// Enqueues the sums of the chunks of the gradients of some parameters, in their order, on a CUDA stream. All pointers
// are of the device.
void chunk_sums_cuda(const optim::ParamJob* params, int32_t num_params, int64_t num_chunks, double* sums, void* stream);

}  // namespace drivetrain::grad
