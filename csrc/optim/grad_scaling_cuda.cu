// The treatment of gradients on CUDA: adds up the sums of their chunks. Includes no torch header.
//
// One block, each warp a group of 1,024 sums at a time: GPT-2's 124 M elements are 30,000 sums in 30 groups, 240 KB
// that lie in the L2 cache, and every warp takes one group in two rounds of loads.
#include "base/launch_cuda.h"
#include "formats/summation_cuda.cuh"
#include "optim/cuda_step.h"

namespace drivetrain::optim {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads)
    treat(TreatmentAsked asked, TreatmentScalars scalars, const double* chunk_sums, int64_t num_chunks,
          GradTreatment* treatment) {
  const double sum = formats::sum_in_groups<kThreads>(num_chunks, [=](int64_t i) { return chunk_sums[i]; });
  if (threadIdx.x != 0) return;
  if (scalars.grad_scale != nullptr) asked.grad_scale = *scalars.grad_scale;
  if (scalars.found_inf != nullptr) asked.found_inf = *scalars.found_inf;
  *treatment = treatment_of(asked, sum);
  if (scalars.overflow != nullptr) *scalars.overflow = treatment->norm - treatment->norm == 0 ? 0.0f : 1.0f;
}

}  // namespace

void treat_cuda(const TreatmentAsked& asked, const TreatmentScalars& scalars, const double* chunk_sums,
                int64_t num_chunks, GradTreatment* treatment, void* stream) {
  launch_cuda("launching the treatment of gradients", treat, 1, kThreads, stream, asked, scalars, chunk_sums,
              num_chunks, treatment);
}

}  // namespace drivetrain::optim
