// The Muon step: momentum and step are rules of the one loop, the matrix iteration between them is torch's GEMM.
#pragma once

#include <c10/core/Device.h>

#include "optim/step.h"

namespace drivetrain::optim {

// The whole job, whose rules are MuonMomentum's, on any device that has kernels. Autograd must be off.
void run_muon(c10::Device device, const StepJob& job);

}  // namespace drivetrain::optim
