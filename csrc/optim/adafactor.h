// The Adafactor step: factored second moments of matrices, plain ones of vectors.
#pragma once

#include "optim/layer.h"
#include "optim/step.h"

namespace drivetrain::optim {

// The whole job, on the CPU; vectors among its parameters go through run_layers with `adapt`. The same bits whatever
// the number of threads and the instruction set.
void run_adafactor(const StepJob& job, Adapt adapt);

}  // namespace drivetrain::optim
