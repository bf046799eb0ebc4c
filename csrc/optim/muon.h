// The Muon step: a momentum per matrix, made orthogonal by Newton-Schulz in bfloat16 matrix products.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "optim/step.h"

namespace drivetrain::optim {

// Matrices of one shape that are iterated together.
struct MuonBatch {
  int32_t first, number;  // of the plan's matrices
  int64_t rows, columns;  // as memory has them
  int64_t total;          // elements of its jobs, with the gaps between them
  MuonArgs args;          // what the iteration depends on
};

// A step's matrices batch by batch, and their two jobs: of the momenta, which leaves them in bfloat16 as if they were
// the parameter, and of the step, whose gradient is what the iteration has made of those. Rules have the plan's order.
struct MuonPlan {
  std::vector<int32_t> order;  // indices of the step's parameters
  std::vector<ParamJob> momenta, steps;
  std::vector<MuonBatch> batches;
  at::Tensor memory[2];  // of the iteration: results go to and fro; batches have it one after the other
};

// args: of each parameter. What lr is does not matter.
MuonPlan plan_muon(c10::Device device, const ParamJob* params, const std::vector<MuonArgs>& args);

// All batches. momenta, steps: the plan's, and like the job's rules where `run`, a pass over a job's parameters, looks.
void run_muon(const MuonPlan& plan, const StepJob& job, const ParamJob* momenta, const ParamJob* steps,
              const std::function<void(const StepJob&)>& run);

// The whole job, on the CPU (run_cuda.cpp: on CUDA).
void run_muon_cpu(const StepJob& job);

}  // namespace drivetrain::optim
