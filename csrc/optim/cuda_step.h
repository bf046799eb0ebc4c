// One step on CUDA as plain data, launch by launch: every call enqueues on a CUDA stream (cudaStream_t), waits for
// nothing, and throws EnvironmentError when the launch fails. All pointers are of the device. Needs no torch header. In
// no_cuda.cpp all of it says that there is no CUDA.
#pragma once

#include <cstdint>

#include "optim/adafactor_pass.h"
#include "optim/grad_scaling.h"
#include "optim/share.h"
#include "optim/step.h"
#include "optim/step_plan.h"

namespace drivetrain::optim {

bool has_cuda();

// Where numbers lie that only the device knows; null where the host's hold.
struct TreatmentScalars {
  const float* grad_scale;
  const float* found_inf;
  float* overflow;  // gets 1 if the norm is not finite, else 0
};

// Enqueues the sums of squares of the gradients of some parameters, chunk by chunk (formats/summation.h) in their
// order.
void chunk_sums_cuda(const ParamJob* params, int32_t num_params, int64_t num_chunks, double* sums, void* stream);

// treatment_of(), the norm's sum being that of the chunks.
void treat_cuda(const TreatmentAsked& asked, const TreatmentScalars& scalars, const double* chunk_sums,
                int64_t num_chunks, GradTreatment* treatment, void* stream);

// A group's hyper-parameters.
struct GroupNumbers {
  Hypers hypers;
  const void* lr;  // on the device: takes the place of hypers.lr unless null
  bool lr_is_double;
};

// From what one parameter's RuleArgs and random bits are made.
struct ParamStart {
  void* counter;  // of steps done; null: neither its rule nor its rounding needs any
  bool counter_is_double;
  bool counts_steps;  // the rule does
  int32_t numbers;    // index into the step's
  double steps_done;  // what a rule that does not is told instead
  uint64_t seed;      // of the random bits
};

// Fills rules[i], or where the step has a plan (step_plan.h) records[i], and params[i].key; and counts the step unless
// the treatment (may be null) skips it: of the starts beyond num_params too. params[i].rule must be i.
struct StepStart {
  RuleKind kind;
  ParamJob* params;
  const ParamStart* starts;
  const GroupNumbers* numbers;
  RuleArgs* rules;
  int32_t num_params, num_starts;
  const GradTreatment* treatment;
  StepRecord* records = nullptr;
};
void start_cuda(const StepStart& start, void* stream);

// Of Adafactor's matrices: takes gradients into the states of rows and columns, and fills what the parameters' first
// states point to. All pointers are of the device; `rules` have been started.
void factor_cuda(const StepJob& job, const Factored* matrices, int32_t num_matrices, int64_t num_units,
                 int64_t num_blocks, void* stream, const Between* between = nullptr);

// Of a rule that asks for norms (trust_ratio.h): takes the sums over all chunks, for which there must be memory, and
// adapts `rules`, which are the job's. Writes nothing else.
void adapt_cuda(const StepJob& job, int64_t num_chunks, LayerSums* sums, RuleArgs* rules, void* stream,
                const Between* between = nullptr);

// One launch of a plan (step_plan.h), whose records and items are all of the plan's.
void step_kernel_cuda(const StepLaunch& launch, const StepRecord* records, const StepItem* items, const StepJob& job,
                      void* stream);

// The whole step, norms apart, with formats chosen at run time.
void step_cuda(const StepJob& job, void* stream);

}  // namespace drivetrain::optim
