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
  using Base::head_of;
  using Base::is_squared;
  using Base::kCodes;
  using Base::kElements;
  using Base::kGradBytes;
  using Base::kSmall;
  using Base::kStates;
  using Base::kTeam;
  using Base::kUnit;
  using Base::kUnits;
  using Base::param_value;
  using Base::pointers_of;
  using Base::put_param;
  using Base::put_state;
  using Base::rule_of;
  using Base::state_value;
  using Base::update_exactly;
  using typename Base::Head;
  using typename Base::Pointers;
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
          // Rules with codes divide by the same root, which checks its range.
          if (kCodes && is_squared(s)) own[s] = formats::square_root_in_range(own[s].value);
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
  static __device__ __forceinline__ void leave_grads(const StepRecord* own, uint32_t unit) {
    const Head head = head_of(own);
    const Pointers at = pointers_of(own);
    const bool zeroes = head.after() == GradAfter::kZero;
    if (zeroes && head.is_wide(unit)) {
      const uint32_t zeros[kElements * kGradBytes / 4] = {};
      return Base::template store_stream<kGradBytes, true>(at.grad, unit, at.numel, zeros);
    }
#pragma unroll 1
    for (int k = 0; k < kElements; ++k) {
      const int64_t e = element(unit, k);
      if (e >= at.numel) continue;
      const float after = zeroes ? 0.0f : head.factor * Base::template loaded_plain<kGrad>(at.grad, e);
      Base::template store_plain<kGrad>(at.grad, e, after);
    }
  }

  // Updates a lane's elements, whose first unit is number `unit` of the parameter.
  static __device__ __forceinline__ void update(const StepRecord* own, uint32_t unit) {
    const Head head = head_of(own);
    if (!head.skips()) {
      Raw raw;
      Prepared prepared;
      if (head.is_wide(unit)) {
        Base::template load<true>(own, unit, raw);
      } else {
        Base::template load<false>(own, unit, raw);
      }
      if (!compute(rule_of(own), head.factor, raw, prepared)) {
        update_exactly(own, unit, prepared);
      } else if (head_of(own).is_wide(unit)) {
        Base::template store<true>(own, unit, raw);
      } else {
        Base::template store<false>(own, unit, raw);
      }
      if constexpr (kCodes) encode_states(own, unit, raw, prepared);
    }
    if (head_of(own).after() != GradAfter::kKeep) leave_grads(own, unit);
  }

  static __device__ __forceinline__ void run(const StepKernelJob& job) {
    constexpr uint32_t kUnitsOfBlock = kBlockElements / kUnit;
    __shared__ SharedRecord records[kStepThreads / kLanesOfSmall];
    const unsigned thread = threadIdx.x;
    uint32_t words[2];
    load_vector<2>(job.blocks + blockIdx.x, words);
    const auto part = static_cast<int32_t>(words[1]);
    const bool is_small = part < 0;
    const auto team = is_small ? static_cast<int32_t>(thread / kTeam) : 0;
    const bool has_param = !is_small || team < -part;
    const auto param = static_cast<int32_t>(words[0]) + (has_param ? team : 0);
    SharedRecord& own = records[thread / kLanesOfSmall];
    const unsigned lane = lane_of(kLanesOfSmall);
    load_vector<2>(reinterpret_cast<const uint64_t*>(job.records + param) + lane, words);
    reinterpret_cast<uint64_t*>(&own)[lane] = static_cast<uint64_t>(words[1]) << 32 | words[0];
    __syncwarp();
    if (!has_param) return;
    const Head head = head_of(&own.record);
    if (head.skips() && head.after() != GradAfter::kZero) return;
    uint32_t unit =
        is_small ? lane_of(kTeam)
                 : static_cast<uint32_t>(part) * kUnitsOfBlock + thread / kWarp * (kWarp * kUnits) + lane_of(kWarp);
    if constexpr (kCodes) {
      // All lanes of a warp encode its block.
      if (unit - lane_of(kWarp) < head.units) update(&own.record, unit);
    } else if constexpr (kSmall == kTeam * kElements && kBlockElements == kStepThreads * kElements) {
      if (unit < head.units) update(&own.record, unit);
    } else {
      const uint32_t stride = is_small ? kTeam : kStepThreads;
      const uint32_t end_of_block = (static_cast<uint32_t>(part) + 1) * kUnitsOfBlock;
      const uint32_t end = is_small || head.units < end_of_block ? head.units : end_of_block;
#pragma unroll 1
      for (; unit < end; unit += stride) update(&own.record, unit);
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
