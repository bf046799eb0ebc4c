// Implements the Adafactor step: factored second moments of matrices, and plain ones of vectors.
#pragma once

#include <vector>

#include "optim/adafactor_pass.h"
#include "optim/step.h"
#include "optim/trust_ratio.h"

namespace drivetrain::optim {

// The matrices among a step's parameters, and their temporary memory.
struct Factoring {
  std::vector<Factored> matrices;
  int64_t num_units = 0, num_blocks = 0;
  int64_t num_doubles = 0;  // temporary memory in doubles
};
Factoring factoring_of(const ParamJob* params, int32_t num_params);

// Places the matrices' sums, and the first states of their parameters, into `memory`.
void place_factors(Factoring& factoring, ParamJob* params, double* memory);

// Runs the whole job on the CPU (adafactor_cuda.cu: on CUDA). The bits do not depend on the number of threads, the
// instruction set or the device.
void run_adafactor(const StepJob& job, Adapt adapt);

}  // namespace drivetrain::optim
