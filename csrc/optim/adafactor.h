// The Adafactor step: factored second moments of matrices, plain ones of vectors.
#pragma once

#include <vector>

#include "optim/adafactor_pass.h"
#include "optim/step.h"
#include "optim/trust_ratio.h"

namespace drivetrain::optim {

// The matrices among a step's parameters, and what they need between its passes.
struct Factoring {
  std::vector<Factored> matrices;
  int64_t num_units = 0, num_blocks = 0;
  int64_t num_doubles = 0;  // of memory
};
Factoring factoring_of(const ParamJob* params, int32_t num_params);

// Points the matrices' sums and the first states of their parameters into that memory.
void place_factors(Factoring& factoring, ParamJob* params, double* memory);

// The whole job, on the CPU (adafactor_cuda.cu: on CUDA). The same bits whatever the number of threads, the instruction
// set and the device.
void run_adafactor(const StepJob& job, Adapt adapt);

// The same where other ranks have parts of the parameters. params: the job's, whose matrices `factoring` has and whose
// first states it has placed.
void run_shared_adafactor(const StepJob& job, const Factoring& factoring, Adapt adapt, const Between& between);

}  // namespace drivetrain::optim
