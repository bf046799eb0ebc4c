// Declares the job of a specialized step kernel and how a warp divides its elements. Includes no torch header.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/wide_cuda.cuh"
#include "formats/decode_cuda.cuh"
#include "formats/ranged_float.cuh"
#include "optim/step_plan.h"

namespace drivetrain::optim {

struct StepKernelJob {
  const StepRecord* records;
  const StepItem* items;
  const GradScaling* grad_scaling_on_device;  // replaces grad_scaling unless null
  GradScaling grad_scaling;
  int32_t num_items;
};

struct LaneScaling {
  float factor;
  GradAfter after;
  bool skips;
};

// Reads the scaling; kernels call it wherever they need it, to save registers (see StepMemory).
__device__ __forceinline__ LaneScaling lane_scaling_of(const StepKernelJob& job) {
  static_assert(offsetof(GradScaling, after) == 8 && offsetof(GradScaling, skips) == 9);
  struct {
    uint32_t words[4];
  } bits;
  if (job.grad_scaling_on_device != nullptr) {
    load_words<16>(job.grad_scaling_on_device, bits.words);
  } else {
    std::memcpy(&bits, &job.grad_scaling, sizeof(bits));
  }
  double factor;
  std::memcpy(&factor, &bits, sizeof(factor));
  return {static_cast<float>(factor), static_cast<GradAfter>(bits.words[2] & 0xffu), (bits.words[2] & 0xff00u) != 0};
}

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Returns the thread's index in its team of `team` threads, a power of two.
__device__ __forceinline__ unsigned lane_of(unsigned team) { return threadIdx.x & (team - 1); }

// Finds the last item whose blocks begin at or before `block`. All lanes of the warp call it, and each checks another
// item.
__device__ __forceinline__ int find_item(const StepItem* items, int num_items, int block) {
  const int lane = static_cast<int>(lane_of(kWarp));
  int first = 0, count = num_items;
  while (count > 1) {
    const int step = static_cast<int>((static_cast<unsigned>(count) + kWarp - 1) / kWarp), position = lane * step;
    const bool is_there = position < count && items[first + position].first_block <= block;
    const int last = kWarp - 1 - __clz(static_cast<int>(__ballot_sync(kAllLanes, is_there)));
    first += last * step;
    count = min(step, count - last * step);
  }
  return first;
}

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
  static constexpr int kExtraBytes = kParam == Format::kBFloat16Remainder16  ? 2
                                     : kParam == Format::kBFloat16Remainder8 ? 1
                                     : kParam == Format::kFloat16Master      ? 4
                                                                             : 0;
  static constexpr bool kPairs = kExtraBytes > 0;

  // A lane's elements are units of consecutive ones, and a warp's units lie side by side. With codes a warp takes one
  // block.
  static constexpr int kUnit = kCodes || kGradBytes == 4 || kStateBytes == 4 ? 4 : 8;
  static constexpr int kUnits = kCodes ? kBlock / (kWarp * kUnit) : 1;
  static constexpr int kElements = kUnit * kUnits, kUnitStride = kWarp * kUnit;
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
