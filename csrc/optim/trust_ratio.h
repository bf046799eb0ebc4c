// Steps whose length depends on norms over a whole parameter: a pass that only reads, then the step itself.
#pragma once

#include "optim/share.h"
#include "optim/step.h"

namespace drivetrain::optim {

// What a rule makes of one parameter's sums, before its step.
using Adapt = void (*)(RuleArgs& args, const LayerSums& sums, int64_t numel);

// The whole job, on the CPU (trust_ratio_cuda.cu: on CUDA). The same bits whatever the number of threads, the
// instruction set and the device.
void run_layers(const StepJob& job, Adapt adapt);

// The same where other ranks have parts of the parameters: all sums first.
void run_shared_layers(const StepJob& job, Adapt adapt, const Between& between);

}  // namespace drivetrain::optim
