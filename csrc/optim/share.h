// Declares the callbacks through which a step with sums over whole parameters includes other ranks' parts. Needs no
// torch header.
#pragma once

#include <functional>

#include "optim/adafactor_pass.h"
#include "optim/step.h"

namespace drivetrain::optim {

// Called between a step's passes, on CUDA when their launches are enqueued. Each may write its argument.
struct Between {
  std::function<void()> factor_sums;                // after the sums of squares of Adafactor's rows and columns
  std::function<void()> row_factors;                // after the row factors, with the mean over this rank's rows
  std::function<void(TrustRatioSums* sums)> norms;  // per parameter on the CPU, per chunk on CUDA
};

}  // namespace drivetrain::optim
