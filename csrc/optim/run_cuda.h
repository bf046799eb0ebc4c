// Runs batches on CUDA: their tables, their gradients' treatment and their launches, with no wait for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/cuda_step.h"
#include "optim/step_reader.h"

namespace drivetrain::optim {

// Puts what kernels read of the batch onto its device; before the calls below.
void place_on_device(Batch& batch);

// What is asked of the gradients of all batches, which are on one device, worked out there: a GradTreatment as bytes.
at::Tensor treat_on_device(const std::vector<const Batch*>& batches, const TreatmentAsked& asked,
                           const TreatmentScalars& scalars);

// One launch for the rules' scalars and the step counters; two between for rules that ask for norms, and three before
// those for Adafactor's matrices; one for the step, or one for each set of formats that has a kernel of its own. Of
// Muon two for each of its batches, and its matrix products.
// between: of a rule that asks for norms, null: nobody wants to know.
void run_on_device(Batch& batch, StepJob job, const Between* between = nullptr);

}  // namespace drivetrain::optim
