// Declares the launches of one step on CUDA. Every call enqueues on a CUDA stream (cudaStream_t), waits for nothing,
// and throws EnvironmentError if the launch fails. All pointers are device pointers. Needs no torch header. no_cuda.cpp
// has the functions of a build without CUDA.
#pragma once

#include <cstdint>

#include "optim/adafactor_pass.h"
#include "optim/grad_scaling.h"
#include "optim/step.h"
#include "optim/step_plan.h"

namespace drivetrain::optim {

bool has_cuda();

// Addresses of numbers on the device; null where the host's numbers apply.
struct GradScalingScalars {
  const float* grad_scale;
  const float* found_inf;
  float* overflow;  // receives 1 if the norm is not finite, else 0
};

// Enqueues the sums of squares of the gradients of some parameters, chunk by chunk (formats/summation.h) in their
// order.
void chunk_sums_cuda(const ParamJob* params, int32_t num_params, int64_t num_chunks, double* sums, void* stream);
// Likewise of one gradient.
void chunk_sums_cuda(const formats::TypedArray& values, int64_t numel, double* sums, void* stream);

// Computes grad_scaling_of() on the device, with the sum over all chunks.
void compute_grad_scaling_cuda(const GradScalingOptions& asked, const GradScalingScalars& scalars,
                               const double* chunk_sums, int64_t num_chunks, GradScaling* grad_scaling, void* stream);

// A group's hyper-parameters.
struct GroupNumbers {
  Hypers hypers;
  const void* lr;  // on the device: replaces hypers.lr unless null
  bool lr_is_double;
};

// The data that one parameter's RuleArgs and random bits are computed from.
struct ParamStart {
  void* counter;  // step counter; null if neither the rule nor the rounding needs one
  bool counter_is_double;
  bool counts_steps;                // the rule counts steps
  int32_t numbers;                  // index into StepStart::numbers
  double steps_done;                // for rules that do not count steps
  uint64_t seed;                    // seed of the random bits
  void* scalars[kMaxScalars] = {};  // the rule's scalars, on the device
  bool scalars_are_double[kMaxScalars] = {};
  int32_t other = -1;  // index into StepStart::others of a parameter without a specialized kernel; -1: none
};

// Fills records[i] where the step has a plan (step_plan.h), else rules[i], and params[i].key. For other parameters of a
// planned step, fills rules[i] and the key in `others`. Increments the step counters and advances the scalars unless
// the grad scaling (may be null) skips the step, also for the starts beyond num_params. params[i].rule must be i.
struct StepStart {
  RuleKind kind;
  ParamJob* params;
  const ParamStart* starts;
  const GroupNumbers* numbers;
  RuleArgs* rules;
  int32_t num_params, num_starts;
  const GradScaling* grad_scaling;
  StepRecord* records = nullptr;
  ParamJob* others = nullptr;             // null: the step has no plan
  GradScaling grad_scaling_of_host = {};  // of the records where grad_scaling is null
};
void start_cuda(const StepStart& start, void* stream);

// Updates the row and column states of Adafactor's matrices, and fills the factors that the parameters' first states
// point to. `rules` must have been started.
void factor_cuda(const StepJob& job, const Factored* matrices, int32_t num_matrices, int64_t num_units,
                 int64_t num_blocks, void* stream);

// Sums norms over all chunks into `sums` and adapts `rules`, which are the job's, for a rule with a trust ratio
// (trust_ratio.h). Writes nothing else.
void adapt_cuda(const StepJob& job, int64_t num_chunks, TrustRatioSums* sums, RuleArgs* rules, void* stream);

// Enqueues one launch of a plan (step_plan.h). `records` and `blocks` are the whole plan's.
void step_kernel_cuda(const StepLaunch& launch, const StepRecord* records, const StepBlock* blocks, void* stream);

// Enqueues the whole step except norms, with formats chosen at run time.
void step_cuda(const StepJob& job, void* stream);

}  // namespace drivetrain::optim
