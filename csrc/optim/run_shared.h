// Runs the step of a rank that has parts of parameters, for rules with sums over whole parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "optim/step_reader.h"

namespace drivetrain::optim {

// Shares the sums of a batch's parameters between passes, and writes the sums that the step continues with. Every step
// runs all stages of a rule, also where this rank has no elements. The stages are:
//
//   "factor_sums": per matrix [units, matrices, rows] and [units, matrices, columns], sums of squares of units
//   "row_factors": per matrix [matrices, rows], which contain the root of the mean over this rank's rows
//   "norms": [params, 2], the sums of squares of parameters and directions
using Share = std::function<void(const std::string& stage, bool in_double, const std::vector<at::Tensor>& params,
                                 const std::vector<at::Tensor>& sums)>;

// Runs the whole job of a batch whose rule has a trust ratio.
void run_shared(Batch& batch, const std::vector<Written>& written, const StepJob& job, const Share& share);

}  // namespace drivetrain::optim
