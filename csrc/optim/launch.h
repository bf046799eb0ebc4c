// Runs a step's loop over its parameters on the CPU's threads (run_cuda.h: on CUDA).
#pragma once

#include <cstdint>

#include "optim/step.h"

namespace drivetrain::optim {

// Of the flat order [begin, end): both 0, the total, or where a parameter begins.
void run_step_cpu(const StepJob& job, int64_t begin, int64_t end);

// How many threads a large step really runs on. (1 in a build without OpenMP, whatever torch.get_num_threads() says.)
int num_step_threads();

}  // namespace drivetrain::optim
