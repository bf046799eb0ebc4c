// Runs a step's loop over its parameters: on the CPU's threads, or enqueued on a device's current stream.
#pragma once

#include <c10/core/Device.h>

#include "optim/step.h"

namespace drivetrain::optim {

// All of the job, with RuleArgs that the host has made, on a device that the reader has accepted.
void run_step(c10::Device device, const StepJob& job);

// On the CPU, of the flat order [begin, end): both 0, the total, or where a parameter begins.
void run_step_cpu(const StepJob& job, int64_t begin, int64_t end);

// How many threads a large step really runs on. (1 in a build without OpenMP, whatever torch.get_num_threads() says.)
int num_step_threads();

}  // namespace drivetrain::optim
