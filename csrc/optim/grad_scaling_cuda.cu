// Computes the grad scaling on CUDA from the sums of chunks. Includes no torch header.
//
// One block; each warp takes a group of 1,024 sums at a time. GPT-2's 124 M elements have 30,000 sums in 30 groups: 240
// KB in the L2 cache. Every warp takes one group in two rounds of loads.
#include "base/launch_cuda.h"
#include "formats/summation_cuda.cuh"
#include "optim/cuda_step.h"

namespace drivetrain::optim {
namespace {

constexpr int kScalingThreads = 1024;

__global__ void __launch_bounds__(kScalingThreads)
    compute_grad_scaling(GradScalingOptions asked, GradScalingScalars scalars, const double* chunk_sums,
                         int64_t num_chunks, GradScaling* grad_scaling) {
  const double sum = formats::sum_in_groups<kScalingThreads>(num_chunks, [=](int64_t i) { return chunk_sums[i]; });
  if (threadIdx.x != 0) return;
  if (scalars.grad_scale != nullptr) asked.grad_scale = *scalars.grad_scale;
  if (scalars.found_inf != nullptr) asked.found_inf = *scalars.found_inf;
  *grad_scaling = grad_scaling_of(asked, sum);
  if (scalars.overflow != nullptr) *scalars.overflow = grad_scaling->norm - grad_scaling->norm == 0 ? 0.0f : 1.0f;
}

}  // namespace

void compute_grad_scaling_cuda(const GradScalingOptions& asked, const GradScalingScalars& scalars,
                               const double* chunk_sums, int64_t num_chunks, GradScaling* grad_scaling, void* stream) {
  launch_cuda("launching the scaling of gradients", compute_grad_scaling, 1, kScalingThreads, stream, asked, scalars,
              chunk_sums, num_chunks, grad_scaling);
}

}  // namespace drivetrain::optim
