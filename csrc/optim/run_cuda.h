// Runs batches on CUDA: uploads their tables, computes the grad scaling and launches kernels, without waiting for the
// device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "optim/cuda_step.h"
#include "optim/step_reader.h"

namespace drivetrain::optim {

// Uploads the batch's tables to its device. Must precede the calls below.
void place_on_device(Batch& batch);

// Computes the grad scaling of all batches, which share one device, there. Returns a GradScaling as bytes.
// sum_of_squares: float64 [any] there, the sums of chunks in place of the batches' own.
at::Tensor compute_grad_scaling_on_device(const std::vector<Batch*>& batches, const GradScalingOptions& asked,
                                          const GradScalingScalars& scalars,
                                          const std::optional<at::Tensor>& sum_of_squares);

// Sums the squares of contiguous values, chunk by chunk: float64 [chunks] on their device.
at::Tensor chunk_sums_on_device(const at::Tensor& values);

// Runs a batch. One launch computes the rules' scalars and the step counters. Another makes the step, or one per set of
// storage formats with a specialized kernel. Rules with a trust ratio add two launches, and Adafactor's matrices three
// before those. Muon takes two per batch, and its matrix products.
void run_on_device(Batch& batch, StepJob job);

}  // namespace drivetrain::optim
