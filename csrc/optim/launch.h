// Runs a step's loop on the CPU's threads (run_cuda.h: on CUDA).
#pragma once

#include <cstdint>

#include "optim/step.h"

namespace drivetrain::optim {

// Updates [begin, end) of the flat order; both are 0, the total, or the begin of a parameter.
void run_step_cpu(const StepJob& job, int64_t begin, int64_t end);

// Returns how many threads a large step runs on: 1 in a build without OpenMP, whatever torch.get_num_threads() returns.
int num_step_threads();

}  // namespace drivetrain::optim
