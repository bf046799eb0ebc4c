// Implements a step's kernel for one rule and one set of storage formats (step_plan.h), at the speed of memory. A lane
// has 4 or 8 elements, issues all loads of 16 bytes before it uses any value, and computes without a branch per
// element.
#pragma once

#include "optim/step_exact_cuda.cuh"

namespace drivetrain::optim {

template <template <class> class RuleOf, Format kParam, Format kGrad, Format kState>
struct StepKernel : StepCodes<RuleOf, kParam, kGrad, kState> {
  using Base = StepCodes<RuleOf, kParam, kGrad, kState>;
  using Base::element;
  using Base::encode_states;
  using Base::grad_value;
  using Base::is_squared;
  using Base::is_wide;
  using Base::kCodes;
  using Base::kElements;
  using Base::kExtraBytes;
  using Base::kGradBytes;
  using Base::kPairs;
  using Base::kParamBytes;
  using Base::kSmall;
  using Base::kStateBytes;
  using Base::kStates;
  using Base::kTeam;
  using Base::kUnit;
  using Base::load;
  using Base::param_value;
  using Base::pointers_of;
  using Base::put_param;
  using Base::put_state;
  using Base::rule_of;
  using Base::state_value;
  using Base::update_exactly;
  using typename Base::Prepared;
  using typename Base::Raw;
  using typename Base::Rule;

  // Computes the step of a lane's elements in place; encode() adds the codes. Returns whether the results are exact; if
  // not, update_exactly() must compute them.

  static __device__ __forceinline__ bool compute(const Rule& rule, float factor, Raw& raw, Prepared& prepared) {
    MetRange met;
    float zero = 0;  // becomes NaN once a rounded value is NaN or infinite
    bool is_special = false;
#pragma unroll
    for (int first = 0; first < kElements; first += 4) {
      float param[4], state[kMaxStatesOfKernels][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        RangedFloat value = param_value(raw, first + k), own[kMaxStates];
#pragma unroll
        for (int s = 0; s < kStates; ++s) own[s] = state_value(raw, s, first + k);
        rule(value, RangedFloat(factor * grad_value(raw, first + k)), own);
        param[k] = value.value;
        met = joined(met, value.met);
        if constexpr (kParam != Format::kFloat32) zero = fmaf(value.value, 0.0f, zero);
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          if (kCodes && is_squared(s)) own[s] = square_root(own[s]);
          state[s][k] = own[s].value;
          met = joined(met, own[s].met);
          if constexpr (kState == Format::kBFloat16) zero = fmaf(own[s].value, 0.0f, zero);
          if constexpr (kCodes) prepared.value[s][first + k] = own[s].value;
        }
      }
      put_param(raw, first, param);
#pragma unroll
      for (int s = 0; s < kStates; ++s) put_state(raw, s, first, state[s]);
      // Checks after every four elements, so that the compiler works on four at a time, for want of registers.
      if (!kCodes && !(met.is_right() && zero == 0)) return false;
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if constexpr (kCodes) is_special |= has_special(raw.scale[s]);
    }
    return met.is_right() && zero == 0 && !is_special;
  }

  // Writes gradients after the step. Scaled ones are read again: they are rarely needed, and registers are scarce.
  static __device__ __forceinline__ void leave_grads(const StepRecord& at, const LaneScaling& grad_scaling,
                                                     int64_t first, unsigned team, bool wide) {
    if (wide && grad_scaling.after == GradAfter::kZero) {
      const uint32_t zeros[kElements * kGradBytes / 4] = {};
      return Base::template store_stream<kGradBytes>(at.grad, first + lane_of(team) * kUnit, zeros);
    }
#pragma unroll 1
    for (int k = 0; k < kElements; ++k) {
      const int64_t e = element(first, team, wide, k);
      if (e >= at.numel) continue;
      const float grad = grad_scaling.after == GradAfter::kZero
                             ? 0.0f
                             : grad_scaling.factor * Base::template loaded_plain<kGrad>(at.grad, e);
      Base::template store_plain<kGrad>(at.grad, e, grad);
    }
  }

  // Updates a team's kElements per lane from `first` on. Returns false if there are none.
  static __device__ __forceinline__ bool update(const StepKernelJob& job, int param, int64_t first, unsigned team,
                                                bool skips) {
    const StepRecord from = pointers_of(job, param);
    if (first >= from.numel) return false;
    const bool wide = is_wide(from, first, team);
    if (!skips) {
      Raw raw;
      Prepared prepared;
      bool is_computed = false;
      if (wide) {
        const int64_t i = first + lane_of(team) * kUnit;
        load(from, i, raw);
        is_computed = compute(rule_of(job, param), lane_scaling_of(job).factor, raw, prepared);
        if (is_computed) {
          const StepRecord to = pointers_of(job, param);
          Base::template store_stream<kParamBytes>(to.param, i, raw.param);
          if constexpr (kPairs) Base::template store_stream<kExtraBytes>(to.param_extra, i, raw.extra);
          if constexpr (!kCodes) {
#pragma unroll
            for (int s = 0; s < kStates; ++s)
              Base::template store_stream<kStateBytes>(to.state[s].data, i, raw.state[s]);
          }
        }
      }
      if (!is_computed) update_exactly(job, param, first, team, wide, prepared);
      if constexpr (kCodes) encode_states(pointers_of(job, param), first, wide, raw, prepared);
    }
    const LaneScaling grad_scaling = lane_scaling_of(job);
    if (grad_scaling.after != GradAfter::kKeep) leave_grads(pointers_of(job, param), grad_scaling, first, team, wide);
    return true;
  }

  static __device__ __forceinline__ void run(const StepKernelJob& job) {
    const LaneScaling grad_scaling = lane_scaling_of(job);
    if (grad_scaling.skips && grad_scaling.after != GradAfter::kZero) return;
    const int block = static_cast<int>(blockIdx.x);
    const unsigned thread = threadIdx.x;
    const StepItem item = load_aligned(job.items + find_item(job.items, job.num_items, block));
    int param = item.first_param;
    // A team of lanes takes the elements [first, end), in strides where the block has more than one tile.
    int64_t first = 0, end = kSmall;
    unsigned team = kWarp;
    if (item.num_params > 0) {
      if (static_cast<int>(thread / kTeam) >= item.num_params) return;
      param += static_cast<int>(thread / kTeam);
      team = kTeam;
    } else {
      first = static_cast<int64_t>(block - item.first_block) * kBlockElements;
      end = first + kBlockElements;
      first += thread / kWarp * (kWarp * kElements);
    }
    if constexpr (kSmall == kTeam * kElements && kBlockElements == kStepThreads * kElements) {
      update(job, param, first, team, grad_scaling.skips);
    } else {
      const int stride = (item.num_params > 0 ? kTeam : kStepThreads) * kElements;
#pragma unroll 1
      for (; first < end; first += stride) {
        if (!update(job, param, first, team, grad_scaling.skips)) return;
      }
    }
  }
};

// Allow 5, 4 and 4 blocks per multiprocessor, or more where blocks are smaller.
template <template <class> class RuleOf, Format kParam, Format kGrad, Format kState>
constexpr int kMaxRegisters = StepKernel<RuleOf, kParam, kGrad, kState>::kCodes           ? 64
                              : StepKernel<RuleOf, kParam, kGrad, kState>::kElements == 4 ? 48
                                                                                          : 56;

template <template <class> class RuleOf, Format kParam, Format kGrad, Format kState>
__global__ void __maxnreg__((kMaxRegisters<RuleOf, kParam, kGrad, kState>))
    step_kernel(const __grid_constant__ StepKernelJob job) {
  StepKernel<RuleOf, kParam, kGrad, kState>::run(job);
}

}  // namespace drivetrain::optim
