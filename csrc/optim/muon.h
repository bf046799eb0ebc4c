// Implements the Muon step: a momentum per matrix, orthogonalized by Newton-Schulz in bfloat16 matrix products.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "optim/step.h"

namespace drivetrain::ddp {
class TorchComm;
}  // namespace drivetrain::ddp

namespace drivetrain::optim {

// The ranks that share a step's matrices. Each matrix has a home, the rank that orthogonalizes it.
struct MuonRanks {
  std::shared_ptr<ddp::TorchComm> comm;  // null: this rank is the home of all
  c10::Device device = at::kCPU;         // of the matrices
  uint64_t group = 0;                    // a hash of its name
  std::vector<int64_t> whole_rows;       // by parameter, where ranks hold rows of it as torch divides them; else empty
  int rank = 0, size = 1;

  bool hold_rows() const { return !whole_rows.empty(); }
};

// Matrices of one shape and one home that share an iteration.
struct MuonMatrices {
  int32_t number;
  int64_t rows, columns;  // the shape in memory of a whole matrix
  bool is_transposed;
  int64_t begin;  // of their elements among the home's in a round
  MuonArgs args;

  int64_t numel() const { return number * rows * columns; }
};

// Matrices that ranks orthogonalize at the same time.
struct MuonRound {
  int32_t first = 0, number = 0;     // indices of the plan's jobs
  int64_t total = 0;                 // elements of these on this rank, including gaps
  int64_t most = 0;                  // elements at the home that has most
  std::vector<MuonMatrices> mine;    // matrices at home on this rank
  std::vector<int64_t> sent, taken;  // bytes of rows to each home, and of each rank's rows to this rank
};

// A step's matrices, round by round and home by home, with two jobs each. The first updates the momentum and leaves it
// in bfloat16 in place of the parameter. The second steps, with the iteration's result as the gradient. Rules are in
// the plan's order.
struct MuonPlan {
  MuonRanks ranks;
  std::vector<int32_t> order;  // indices of the step's parameters
  std::vector<ParamJob> momenta, steps;
  std::vector<MuonArgs> args;  // without the learning rate
  std::vector<MuonRound> rounds;
  // Rounds take turns in these: every rank's results, or this rank's rows of all matrices.
  std::vector<at::Tensor> results;
  at::Tensor wholes, scratch;        // whole matrices and the iteration's other buffer
  std::vector<at::Tensor> messages;  // other ranks' rows
};

// All matrices of a step, in numbers that are equal on ranks that step equal matrices.
struct MuonTotals {
  uint64_t hash = 0;
  int64_t matrices = 0, elements = 0;
  bool skips = false;
};

// Plans the step and adds it to the totals. `args` has an element per parameter; its lr is ignored.
MuonPlan plan_muon(const ParamJob* params, const std::vector<MuonArgs>& args, MuonRanks ranks, MuonTotals& totals);

// Throws UserError, on every rank, unless all ranks step equal matrices. Every rank must call it in every step, also
// one without matrices. `agreed` is a hash of an earlier step. On CUDA an equal step is not compared again, because
// that waits for the device.
void check_totals(const MuonRanks& ranks, const MuonTotals& mine, uint64_t& agreed);

// Runs all rounds. `momenta`, `steps` and the job's rules are in the memory that `run`, a pass over a job's
// parameters, reads.
void run_muon(MuonPlan& plan, const StepJob& job, const ParamJob* momenta, const ParamJob* steps,
              const std::function<void(const StepJob&)>& run);

// Runs the whole job on the CPU (run_cuda.cpp: on CUDA). The rules are by parameter.
void run_muon_cpu(MuonPlan& plan, const StepJob& job);

}  // namespace drivetrain::optim
