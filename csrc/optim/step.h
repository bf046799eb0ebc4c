// One optimizer step as plain data: what the CPU and the CUDA loop both receive. Needs no torch header.
#pragma once

#include <cstdint>

#include "optim/rules.h"
#include "optim/storage.h"

namespace drivetrain::optim {

// What a step does with gradients besides reading them.
enum class GradAfter : uint8_t {
  kKeep,     // as they came
  kTreated,  // what the rule was given: times the factor
  kZero,
};
struct GradTreatment {
  double factor = 1;  // every gradient is multiplied by it first: unscaled and clipped
  GradAfter after = GradAfter::kKeep;
  bool skips = false;  // nothing is updated; gradients are zeroed all the same, if they are to be
  double norm = 0;     // of the unscaled gradients, where it was asked for
};

// One parameter: where its values live, and which of the step's rules applies to it.
struct ParamJob {
  Stream param;
  Stream grad;               // written only where the treatment says so
  Stream state[kMaxStates];  // as many as the rule has, in the rule's order
  // Position of this parameter's first element in the step's flat order; a multiple of kBlock where a stream is cut up
  // in blocks, so that ranges which begin and end at such multiples share none.
  int64_t begin;
  int64_t numel;
  int64_t first_chunk;  // of its gradient's (grad/lanes.h), counted through the parameters of its batch
  uint64_t key;         // what stochastic rounding draws from
  int32_t rule;         // index into StepJob::rules
  // Of rules about matrices: the last two dimensions. Memory holds one column after the other if it is transposed.
  bool is_transposed = false;
  int64_t rows = 0, columns = 0;
};

// All parameters of one device that one step updates. Elements are numbered 0 .. total over all parameters, with gaps
// before some, so that a thread or a block takes any range between multiples of kBlock, whatever the parameters' sizes.
struct StepJob {
  RuleKind kind;
  bool in_double;  // compute in double (float64 parameters) instead of float
  GradTreatment treatment;
  const GradTreatment* treatment_on_device;  // CUDA: takes the place of `treatment` unless null
  const ParamJob* params;                    // sorted by begin, none empty
  int32_t num_params;
  const RuleArgs* rules;
  int32_t num_rules;
  int64_t total;
};

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif
// The last one whose `begin` is not beyond `position`, or the first.
template <class Job>
DT_HOST_DEVICE int32_t last_from(const Job* jobs, int32_t num_jobs, int64_t Job::* begin, int64_t position) {
  int32_t low = 0, high = num_jobs - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (jobs[middle].*begin <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The parameter that holds flat element `position`, or the last one before it.
DT_HOST_DEVICE int32_t find_param(const StepJob& job, int64_t position) {
  return last_from(job.params, job.num_params, &ParamJob::begin, position);
}
#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

// step_cpu updates the elements [begin, end) of the flat order; begin is a multiple of kBlock, and so is end unless it
// is the total or a parameter's end. layer_sums_cpu reads the elements [begin, end) of one parameter, both in double in
// an order that depends on their number alone, and writes nothing. convert_cpu writes values from one stream into
// another, rounded as that one's format rounds. One copy of both per instruction set.
namespace baseline {
void step_cpu(const StepJob& job, int64_t begin, int64_t end);
LayerSums layer_sums_cpu(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end);
void convert_cpu(const Stream& from, const Stream& to, int64_t numel, uint64_t key);
}  // namespace baseline
namespace avx2 {
void step_cpu(const StepJob& job, int64_t begin, int64_t end);
LayerSums layer_sums_cpu(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end);
void convert_cpu(const Stream& from, const Stream& to, int64_t numel, uint64_t key);
}  // namespace avx2
namespace avx512 {
void step_cpu(const StepJob& job, int64_t begin, int64_t end);
LayerSums layer_sums_cpu(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end);
void convert_cpu(const Stream& from, const Stream& to, int64_t numel, uint64_t key);
}  // namespace avx512

}  // namespace drivetrain::optim
