// Implements the Muon step: a momentum per matrix, orthogonalized by Newton-Schulz in bfloat16 matrix products.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "optim/step.h"

namespace drivetrain::optim {

// Matrices of one shape that share an iteration.
struct MuonBatch {
  int32_t first, number;  // indices of the plan's matrices
  int64_t rows, columns;  // the shape in memory
  int64_t total;          // elements of its jobs, including gaps
  MuonArgs args;          // the iteration's arguments
};

// A step's matrices, batch by batch, with two jobs each. The first updates the momentum and leaves it in bfloat16 in
// place of the parameter. The second steps, with the iteration's result as the gradient. Rules are in the plan's order.
struct MuonPlan {
  std::vector<int32_t> order;  // indices of the step's parameters
  std::vector<ParamJob> momenta, steps;
  std::vector<MuonBatch> batches;
  at::Tensor memory[2];  // buffers of the iteration, which alternates between them; batches share them
};

// Plans the step. `args` has an element per parameter; its lr is ignored.
MuonPlan plan_muon(c10::Device device, const ParamJob* params, const std::vector<MuonArgs>& args);

// Runs all batches. `momenta`, `steps` and the job's rules are in the memory that `run`, a pass over a job's
// parameters, reads.
void run_muon(const MuonPlan& plan, const StepJob& job, const ParamJob* momenta, const ParamJob* steps,
              const std::function<void(const StepJob&)>& run);

// Runs the whole job on the CPU (run_cuda.cpp: on CUDA).
void run_muon_cpu(const StepJob& job);

}  // namespace drivetrain::optim
