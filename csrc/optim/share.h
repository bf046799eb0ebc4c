// How a step whose rule adds something up over whole parameters takes in what other ranks have of them. Needs no torch
// header.
#pragma once

#include <functional>

#include "optim/adafactor_pass.h"
#include "optim/step.h"

namespace drivetrain::optim {

// Called between a step's passes, on CUDA where their launches are enqueued; each may write into what it is told of.
struct Between {
  std::function<void()> factor_sums;           // the squares of Adafactor's rows and columns are added up
  std::function<void()> row_factors;           // their factors are there, with the mean over this rank's rows
  std::function<void(LayerSums* sums)> norms;  // on the CPU of every parameter, on CUDA of every chunk
};

}  // namespace drivetrain::optim
