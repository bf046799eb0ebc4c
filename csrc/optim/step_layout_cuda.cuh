// Declares the job of a specialized step kernel and how a warp divides its elements. Includes no torch header.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/block_cuda.cuh"
#include "base/wide_cuda.cuh"
#include "formats/decode_cuda.cuh"
#include "formats/ranged_float.cuh"
#include "optim/step_plan.h"

namespace drivetrain::optim {

struct StepKernelJob {
  const StepRecord* records;
  const StepBlock* blocks;
};

// Returns the thread's index in its team of `team` threads, a power of two.
__device__ __forceinline__ unsigned lane_of(unsigned team) { return threadIdx.x & (team - 1); }

// The record of kLanesOfSmall threads in shared memory. The space behind it spreads two records over all banks.
struct SharedRecord {
  StepRecord record;
  uint64_t unused[2];
};

template <template <class> class RuleOf, Format kParam, Format kGrad, Format kState>
struct StepLayout {
  using Rule = RuleOf<float>;
  static constexpr int kStates = Rule::kNumStates;
  static_assert(kStates <= kMaxStatesOfKernels);
  static constexpr bool kCodes = kStates > 0 && kState == Format::kSigned8;

  // Folded when loops over states are unrolled. (Device code cannot refer to the rule's array itself.)
  static constexpr unsigned kSquared = Rule::kSquared[0] + 2u * Rule::kSquared[1];
  static __device__ __forceinline__ bool is_squared(int s) { return (kSquared >> s & 1u) != 0; }

  static constexpr int kParamBytes = bytes_of(kParam), kGradBytes = bytes_of(kGrad), kStateBytes = bytes_of(kState);
  static constexpr int kExtraBytes = step_extra_bytes(kParam);
  static constexpr bool kPairs = kExtraBytes > 0;

  // A lane's elements are units of consecutive ones, and a warp's units lie side by side. With codes a warp takes one
  // block.
  static constexpr int kUnit = step_unit(kCodes, kGradBytes, kStateBytes);
  static constexpr int kUnits = kCodes ? kBlock / (kWarp * kUnit) : 1;
  static constexpr int kElements = kUnit * kUnits;
  static constexpr unsigned kTeam = kCodes ? kWarp : kLanesOfSmall;  // lanes per small parameter

  static constexpr int kSmall = small_param(kCodes, kGradBytes);
  static_assert(kSmall <= kTeam * kElements || kElements == 4);

  // A lane's elements as they lie in memory.
  struct Raw {
    uint32_t param[kElements * kParamBytes / 4];
    uint32_t extra[kPairs ? kElements * kExtraBytes / 4 : 1];
    uint32_t grad[kElements * kGradBytes / 4];
    uint32_t state[kMaxStatesOfKernels][kElements * kStateBytes / 4];
    float scale[kMaxStatesOfKernels];
  };
  // Prepared values of states with codes (storage.h).
  struct Prepared {
    float value[kMaxStatesOfKernels][kElements];
  };
};

}  // namespace drivetrain::optim
