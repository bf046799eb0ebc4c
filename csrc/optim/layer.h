// Steps whose length depends on norms over a whole parameter: a pass that only reads, then the step itself.
#pragma once

#include "optim/step.h"

namespace drivetrain::optim {

// What a rule makes of one parameter's sums, before its step.
using Adapt = void (*)(RuleArgs& args, const LayerSums& sums, int64_t numel);

// The whole job, on the CPU (layer_cuda.cu: on CUDA). The same bits whatever the number of threads, the instruction set
// and the device.
void run_layers(const StepJob& job, Adapt adapt);

}  // namespace drivetrain::optim
