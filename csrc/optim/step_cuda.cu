// The CUDA step: picks the kernel for the rule and launches it once. Includes no torch header.
#include <cuda_runtime.h>

#include <algorithm>

#include "base/check_cuda.h"
#include "optim/loop_cuda.cuh"

namespace drivetrain::optim {
namespace {

template <template <class> class RuleOf>
void launch(const StepJob& job, cudaStream_t stream) {
  // Enough blocks to fill any GPU several times over; larger steps loop.
  constexpr int64_t kMaxBlocks = 1 << 16;
  const auto blocks = static_cast<unsigned>(std::min((job.total + kTileCuda - 1) / kTileCuda, kMaxBlocks));
  if (job.in_double) {
    loop_cuda<RuleOf, double><<<blocks, kThreads, 0, stream>>>(job);
  } else {
    loop_cuda<RuleOf, float><<<blocks, kThreads, 0, stream>>>(job);
  }
  check_cuda(cudaGetLastError(), "launching the optimizer step");
}

}  // namespace

bool has_cuda() { return true; }

void step_cuda(const StepJob& job, void* stream) {
  if (job.total == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (job.kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return launch<Rule>(job, cuda_stream);
    DT_OPTIM_RULES(DT_CASE)
#undef DT_CASE
    default:  // the reader has refused it
      return;
  }
}

}  // namespace drivetrain::optim
