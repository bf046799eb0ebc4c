// Launches the kernel of the rule, with formats chosen at run time. Includes no torch header.
#include <algorithm>

#include "base/launch_cuda.h"
#include "optim/cuda_step.h"
#include "optim/loop_cuda.cuh"

namespace drivetrain::optim {
namespace {

template <template <class> class RuleOf>
void launch(const StepJob& job, void* stream) {
  // Enough blocks to fill any GPU several times; larger steps loop.
  constexpr int64_t kMaxBlocks = 1 << 16;
  if (job.statistics != nullptr) {
    const auto loop = job.in_double ? measured_loop_cuda<RuleOf, double> : measured_loop_cuda<RuleOf, float>;
    return launch_cuda("launching the optimizer step", loop, job.num_chunks, kThreads, stream, job);
  }
  const int64_t blocks = std::min((job.total + kTileCuda - 1) / kTileCuda, kMaxBlocks);
  const auto loop = job.in_double ? loop_cuda<RuleOf, double> : loop_cuda<RuleOf, float>;
  launch_cuda("launching the optimizer step", loop, blocks, kThreads, stream, job);
}

}  // namespace

bool has_cuda() { return true; }

void step_cuda(const StepJob& job, void* stream) {
  if (job.total == 0) return;
  switch (job.kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return launch<Rule>(job, stream);
    DT_OPTIM_RULES(DT_CASE)
    DT_TRUST_RATIO_RULES(DT_CASE)
#undef DT_CASE
    default:  // the reader has rejected it
      return;
  }
}

}  // namespace drivetrain::optim
