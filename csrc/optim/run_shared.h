// Steps of a rank that has parts of parameters, by rules that add something up over whole ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "optim/step_reader.h"

namespace drivetrain::optim {

// Told between passes which sums there are of a batch's parameters; writes what the step goes on with. Per stage:
//   "factor_sums": of each matrix [units, matrices, rows] and [units, matrices, columns], squares that units add up
//   "row_factors": of each matrix [matrices, rows], which contain the root of the mean over this rank's rows
//   "norms": [params, 2], the squares of parameters and of directions
// All stages of a rule come in every step, also where this rank has no elements.
using Share = std::function<void(const std::string& stage, bool in_double, const std::vector<at::Tensor>& params,
                                 const std::vector<at::Tensor>& sums)>;

// The whole job of a batch whose rule asks for norms.
void run_shared(Batch& batch, const std::vector<Written>& written, const StepJob& job, const Share& share);

}  // namespace drivetrain::optim
