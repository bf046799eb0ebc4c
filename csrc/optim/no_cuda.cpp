// Answers for the optimizer step on CUDA in a build without nvcc.
#include "base/no_cuda.h"

#include "optim/cuda_step.h"

namespace drivetrain::optim {

bool has_cuda() { return false; }
void chunk_sums_cuda(const ParamJob*, int32_t, int64_t, double*, void*) { refuse_cuda(); }
void chunk_sums_cuda(const formats::TypedArray&, int64_t, double*, void*) { refuse_cuda(); }
void compute_grad_scaling_cuda(const GradScalingOptions&, const GradScalingScalars&, const double*, int64_t,
                               GradScaling*, void*) {
  refuse_cuda();
}
void start_cuda(const StepStart&, void*) { refuse_cuda(); }
void factor_cuda(const StepJob&, const Factored*, int32_t, int64_t, int64_t, void*) { refuse_cuda(); }
void adapt_cuda(const StepJob&, int64_t, TrustRatioSums*, RuleArgs*, void*) { refuse_cuda(); }
void step_cuda(const StepJob&, void*) { refuse_cuda(); }
void step_kernel_cuda(const StepLaunch&, const StepRecord*, const StepBlock*, void*) { refuse_cuda(); }

}  // namespace drivetrain::optim
