// Checks parameters, states and step counters, for the fast and the checked reading of a step.
#pragma once

#include <ATen/core/Tensor.h>

#include "optim/batch.h"
#include "optim/precision.h"
#include "optim/rule_table.h"

namespace drivetrain::optim {

// Returns whether the tensor's data is in its own storage: it wraps no other tensor (DTensor, FakeTensor).
inline bool has_own_memory(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.key_set().has(c10::DispatchKey::Python) &&
         !tensor.key_set().has(c10::DispatchKey::Functionalize);
}

// Returns whether the parameter has that state.
inline bool has_state(const c10::TensorImpl& param, const RuleInfo::State& state) {
  return state.of_all_shapes || (param.dim() < 2) == (state.kind == StateKind::kSquaredOfVector);
}

inline bool is_double(const at::Tensor& tensor) { return c10::toRealValueType(tensor.scalar_type()) == at::kDouble; }

// Reads a matrix's shape as its memory has it, for rules that need it; vectors have none.
inline void read_shape(const c10::TensorImpl& param, ParamJob& job) {
  if (param.dim() < 2) return;
  job.rows = param.size(-2);
  job.columns = param.size(-1);
  job.is_transposed = !param.is_contiguous();
}

inline bool meets(RuleInfo::Needs needs, const c10::TensorImpl& param) {
  if (needs == RuleInfo::Needs::kNothing) return true;
  return !c10::isComplexType(param.dtype().toScalarType()) && (needs != RuleInfo::Needs::kMatrix || param.dim() == 2);
}

inline bool is_shaped_as_state(const c10::TensorImpl& param, const c10::TensorImpl& state,
                               const RuleInfo::State& info) {
  return info.of_all_shapes ? state.sizes().equals(param.sizes())
                            : state.sizes().equals(*state_sizes(param, info.kind));
}

inline at::Device counter_device(const at::Device& of_param) {
  return of_param.is_cuda() ? of_param : at::Device(at::kCPU);
}

inline bool is_step_counter(const at::Tensor& step, const at::Device& of_param) {
  return step.device() == counter_device(of_param) && step.numel() == 1 &&
         (step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble);
}

inline StepCounter counter_of(const at::Tensor& step) { return {step.data_ptr(), step.scalar_type() == at::kDouble}; }

inline double steps_done(const StepCounter& counter) {
  return counter.is_double ? *static_cast<double*>(counter.value) : *static_cast<float*>(counter.value);
}

}  // namespace drivetrain::optim
