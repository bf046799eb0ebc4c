// Runs steps with a trust ratio, whose length depends on norms of the whole parameter: a pass that only reads, then the
// step.
#pragma once

#include "optim/adafactor_pass.h"
#include "optim/step.h"

namespace drivetrain::optim {

// Adapts a rule's arguments to one parameter's sums, before its step.
using Adapt = void (*)(RuleArgs& args, const TrustRatioSums& sums, int64_t numel);

// Runs the whole job on the CPU (trust_ratio_cuda.cu: on CUDA). The bits do not depend on the number of threads, the
// instruction set or the device.
void run_trust_ratio(const StepJob& job, Adapt adapt);

}  // namespace drivetrain::optim
