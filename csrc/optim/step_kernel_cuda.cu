// Launches the specialized kernels of a step; see step_kernel_cuda.cuh. Includes no torch header.
#include "base/launch_cuda.h"
#include "optim/cuda_step.h"
#include "optim/step_kernel_cuda.cuh"

namespace drivetrain::optim {
namespace {

using Kernel = void (*)(StepKernelJob);

constexpr Kernel kKernels[] = {
#define DT_ROW(Rule, param, grad, state) step_kernel<Rule, Format::param, Format::grad, Format::state>,
    DT_STEP_KERNELS(DT_ROW)
#undef DT_ROW
};

}  // namespace

void step_kernel_cuda(const StepLaunch& launch, const StepRecord* records, const StepBlock* blocks, void* stream) {
  launch_cuda("launching the optimizer step", kKernels[launch.kernel], launch.num_blocks, kStepThreads, stream,
              StepKernelJob{records, blocks + launch.first_block});
}

}  // namespace drivetrain::optim
