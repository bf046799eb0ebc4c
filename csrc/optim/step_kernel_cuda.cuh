// A step's kernel for one rule and one set of formats (step_plan.h), written for the speed of memory: a lane has 4 or 8
// elements, loads all of their streams 16 bytes at a time before it uses any, and computes without a branch per
// element.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/wide_cuda.cuh"
#include "formats/decode_cuda.cuh"
#include "formats/ranged_float.cuh"
#include "optim/step_plan.h"

namespace drivetrain::optim {

struct StepKernelJob {
  const StepRecord* records;
  const StepItem* items;
  const GradTreatment* treatment_on_device;  // takes the place of `treatment` unless null
  GradTreatment treatment;
  int32_t num_items;
};

struct LaneTreatment {
  float factor;
  GradAfter after;
  bool skips;
};

// Read again where it is needed, as pointers are: see StepKernel.
__device__ __forceinline__ LaneTreatment treatment_of(const StepKernelJob& job) {
  static_assert(offsetof(GradTreatment, after) == 8 && offsetof(GradTreatment, skips) == 9);
  struct {
    uint32_t words[4];
  } bits;
  if (job.treatment_on_device != nullptr) {
    load_words<16>(job.treatment_on_device, bits.words);
  } else {
    std::memcpy(&bits, &job.treatment, sizeof(bits));
  }
  double factor;
  std::memcpy(&factor, &bits, sizeof(factor));
  return {static_cast<float>(factor), static_cast<GradAfter>(bits.words[2] & 0xffu), (bits.words[2] & 0xff00u) != 0};
}

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Within its team of as many threads, a power of two.
__device__ __forceinline__ unsigned lane_of(unsigned team) { return threadIdx.x & (team - 1); }

// The last item whose blocks begin at or before `block`. All lanes of the warp call it: each looks at another item.
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
struct StepKernel {
  using Rule = RuleOf<float>;
  static constexpr int kStates = Rule::kNumStates;
  static_assert(kStates <= kMaxStatesOfKernels);
  static constexpr bool kCodes = kStates > 0 && kState == Format::kSigned8;
  static constexpr bool kPairs = kParam == Format::kBFloat16Remainder16 || kParam == Format::kBFloat16Remainder8;

  // Folded once loops over states are unrolled. (Device code cannot refer to the rule's array itself.)
  static constexpr unsigned kSquared = Rule::kSquared[0] + 2u * Rule::kSquared[1];
  static __device__ __forceinline__ bool is_squared(int s) { return (kSquared >> s & 1u) != 0; }

  static constexpr int kParamBytes = bytes_of(kParam), kGradBytes = bytes_of(kGrad), kStateBytes = bytes_of(kState);
  static constexpr int kExtraBytes = !kPairs ? 0 : kParam == Format::kBFloat16Remainder16 ? 2 : 1;

  // A lane's elements are in units of consecutive ones, a warp's units side by side. With codes a warp has a block.
  static constexpr int kUnit = kCodes || kGradBytes == 4 || kStateBytes == 4 ? 4 : 8;
  static constexpr int kUnits = kCodes ? kBlock / (kWarp * kUnit) : 1;
  static constexpr int kElements = kUnit * kUnits, kUnitStride = kWarp * kUnit;
  static constexpr unsigned kTeam = kCodes ? kWarp : kLanesOfSmall;  // lanes of a small parameter

  static constexpr int kSmall = small_param(kCodes, kGradBytes);
  static_assert(kSmall <= kTeam * kElements || kElements == 4);

  // All of a lane's elements as they are in memory.
  struct Raw {
    uint32_t param[kElements * kParamBytes / 4];
    uint32_t extra[kPairs ? kElements * kExtraBytes / 4 : 1];
    uint32_t grad[kElements * kGradBytes / 4];
    uint32_t state[kMaxStatesOfKernels][kElements * kStateBytes / 4];
    float scale[kMaxStatesOfKernels];
  };
  // Of states with codes: what is to be coded.
  struct Prepared {
    float value[kMaxStatesOfKernels][kElements];
  };

  // ---- Memory. i: the lane's first element. Pointers are read from the record where they are used, which costs a load
  // from the nearest cache and keeps registers free for what is under way.

  static __device__ __forceinline__ StepRecord pointers_of(const StepKernelJob& job, int param) {
    const StepRecord* const record = job.records + param;
    constexpr int kBytes = 32 + 16 * kStates;
    uint32_t words[kBytes / 4];
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) reload_vector(reinterpret_cast<const char*>(record) + i, words + i / 4);
    StepRecord result;
    std::memcpy(&result, words, kBytes);
    return result;
  }

  static __device__ __forceinline__ Rule rule_of(const StepKernelJob& job, int param) {
    const StepRecord* const record = job.records + param;
    constexpr int kBytes = (sizeof(Rule) + 15) / 16 * 16;
    uint32_t words[kBytes / 4];
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) reload_vector(reinterpret_cast<const char*>(record->rule) + i, words + i / 4);
    struct {
      uint32_t words[sizeof(Rule) / 4];
    } bits;
    std::memcpy(&bits, words, sizeof(bits));
    return __builtin_bit_cast(Rule, bits);
  }

  // Whether the team's elements from `first` on are all there and all streams are aligned for wide loads.
  static __device__ __forceinline__ bool is_wide(const StepRecord& at, int64_t first, unsigned team) {
    bool result = first + team * kElements <= at.numel;
    result &= is_aligned(at.param, 4 * kWidestWords<kUnit * kParamBytes>) &
              is_aligned(at.grad, 4 * kWidestWords<kUnit * kGradBytes>);
    if constexpr (kPairs) result &= is_aligned(at.param_extra, 4 * kWidestWords<kUnit * kExtraBytes>);
#pragma unroll
    for (int s = 0; s < kStates; ++s) result &= is_aligned(at.state[s].data, 4 * kWidestWords<kUnit * kStateBytes>);
    return result;
  }

  template <int kBytes>
  static __device__ __forceinline__ void load_stream(const char* from, int64_t i, uint32_t* words) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      load_words<kUnit * kBytes>(from + (i + u * kUnitStride) * kBytes, words + u * (kUnit * kBytes / 4));
    }
  }
  template <int kBytes>
  static __device__ __forceinline__ void store_stream(char* to, int64_t i, const uint32_t* words) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      store_words<kUnit * kBytes>(to + (i + u * kUnitStride) * kBytes, words + u * (kUnit * kBytes / 4));
    }
  }

  // Gradients last: all that is computed needs them, so that nothing can be used before everything is under way.
  static __device__ __forceinline__ void load(const StepRecord& at, int64_t i, Raw& raw) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      load_stream<kStateBytes>(at.state[s].data, i, raw.state[s]);
      if constexpr (kCodes) {
        uint32_t word[1];
        load_vector<1>(at.state[s].extra + i / kBlock * 4, word);
        raw.scale[s] = bits_as<float>(word[0]);
      }
    }
    load_stream<kParamBytes>(at.param, i, raw.param);
    if constexpr (kPairs) load_stream<kExtraBytes>(at.param_extra, i, raw.extra);
    load_stream<kGradBytes>(at.grad, i, raw.grad);
  }

  // ---- From words to values and back, for what is usual; compute() says where something is not.

  // A NaN where the remainder belongs to another half (see storage.h).
  static __device__ __forceinline__ float param_value(const Raw& raw, int k) {
    if constexpr (kParam == Format::kBFloat16Remainder16) {
      const int32_t remainder = static_cast<int16_t>(half_of(raw.extra, k));
      return bits_as<float>(widened_bfloat16(raw.param, k) + static_cast<uint32_t>(remainder));
    } else if constexpr (kParam == Format::kBFloat16Remainder8) {
      const int32_t remainder = static_cast<int8_t>(byte_of(raw.extra, k));
      return bits_as<float>(widened_bfloat16(raw.param, k) + static_cast<uint32_t>(remainder * 256));
    } else {
      return bits_as<float>(kParam == Format::kFloat32 ? raw.param[k] : widened_bfloat16(raw.param, k));
    }
  }

  static __device__ __forceinline__ float grad_value(const Raw& raw, int k) {
    return bits_as<float>(kGrad == Format::kFloat32 ? raw.grad[k] : widened_bfloat16(raw.grad, k));
  }

  template <class Kind>
  static __device__ __forceinline__ float decoded(const Raw& raw, int s, int k) {
    const auto code = static_cast<typename Kind::Code>(byte_of(raw.state[s], k));
    return Kind::decode(code, Kind::unit_of(fabsf(raw.scale[s])));
  }
  static __device__ __forceinline__ float state_value(const Raw& raw, int s, int k) {
    if constexpr (kCodes) {
      return is_squared(s) ? decoded<SquaredCode>(raw, s, k) : decoded<SignedCode>(raw, s, k);
    } else {
      return bits_as<float>(kState == Format::kFloat32 ? raw.state[s][k] : widened_bfloat16(raw.state[s], k));
    }
  }

  // Of elements [first, first + 4).
  static __device__ __forceinline__ void put_param(Raw& raw, int first, const float (&values)[4]) {
    uint32_t bits[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) bits[k] = bits_as<uint32_t>(values[k]);
    if constexpr (kParam == Format::kFloat32) {
#pragma unroll
      for (int k = 0; k < 4; ++k) raw.param[first + k] = bits[k];
    } else if constexpr (kParam == Format::kBFloat16) {
      raw.param[first / 2] = pack_bfloat16(values[0], values[1]);
      raw.param[first / 2 + 1] = pack_bfloat16(values[2], values[3]);
    } else {
      if constexpr (kParam == Format::kBFloat16Remainder16) {
        raw.extra[first / 2] = low_halves(bits[0], bits[1]);
        raw.extra[first / 2 + 1] = low_halves(bits[2], bits[3]);
      } else {
        // Rounded to 24 bits, but for the last byte, which is left out and which adding 0x8000 does not carry from.
#pragma unroll
        for (int k = 0; k < 4; ++k) bits[k] += 0x7fu + ((bits[k] >> 8) & 1u);
        raw.extra[first / 4] = four_bytes<1>(bits[0], bits[1], bits[2], bits[3]);
      }
      raw.param[first / 2] = high_halves(bits[0] + 0x8000u, bits[1] + 0x8000u);
      raw.param[first / 2 + 1] = high_halves(bits[2] + 0x8000u, bits[3] + 0x8000u);
    }
  }

  static __device__ __forceinline__ void put_state(Raw& raw, int s, int first, const float (&values)[4]) {
    if constexpr (kState == Format::kFloat32) {
#pragma unroll
      for (int k = 0; k < 4; ++k) raw.state[s][first + k] = bits_as<uint32_t>(values[k]);
    } else if constexpr (kState == Format::kBFloat16) {
      raw.state[s][first / 2] = pack_bfloat16(values[0], values[1]);
      raw.state[s][first / 2 + 1] = pack_bfloat16(values[2], values[3]);
    }
  }

  // ---- The step of a lane's elements, in place. Codes only come with encode().

  // Whether the results hold; if not, update_exactly() is to make them.
  static __device__ __forceinline__ bool compute(const Rule& rule, float factor, Raw& raw, Prepared& prepared) {
    MetRange met;
    float zero = 0;  // a NaN once any of the rounded values is one, or infinite
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
      // Asked after every four, so that the compiler works on four at a time, for want of registers.
      if (!kCodes && !(met.is_right() && zero == 0)) return false;
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if constexpr (kCodes) is_special |= has_special(raw.scale[s]);
    }
    return met.is_right() && zero == 0 && !is_special;
  }

  // ---- One element as the CPU has it, whatever its value and wherever it lies.

  static __device__ __forceinline__ float loaded_param(const StepRecord& at, int64_t e) {
    if constexpr (kParam == Format::kFloat32) return reinterpret_cast<const float*>(at.param)[e];
    const uint16_t half = reinterpret_cast<const uint16_t*>(at.param)[e];
    if constexpr (kParam == Format::kBFloat16) return float_from_bfloat16(half);
    if constexpr (kParam == Format::kBFloat16Remainder16) {
      return join(half, reinterpret_cast<const int16_t*>(at.param_extra)[e]);
    }
    return join8(half, reinterpret_cast<const int8_t*>(at.param_extra)[e]);
  }
  static __device__ __forceinline__ void store_param(const StepRecord& at, int64_t e, float value) {
    auto& half = reinterpret_cast<uint16_t*>(at.param)[e];
    if constexpr (kParam == Format::kFloat32) {
      reinterpret_cast<float*>(at.param)[e] = value;
    } else if constexpr (kParam == Format::kBFloat16) {
      half = bfloat16_from_float(value);
    } else if constexpr (kParam == Format::kBFloat16Remainder16) {
      const Split parts = split(value);
      half = parts.half;
      reinterpret_cast<int16_t*>(at.param_extra)[e] = parts.remainder;
    } else {
      const Split8 parts = split8(value);
      half = parts.half;
      reinterpret_cast<int8_t*>(at.param_extra)[e] = parts.remainder;
    }
  }

  template <Format kFormat>
  static __device__ __forceinline__ float loaded_plain(const char* from, int64_t e) {
    if constexpr (kFormat == Format::kFloat32) return reinterpret_cast<const float*>(from)[e];
    return float_from_bfloat16(reinterpret_cast<const uint16_t*>(from)[e]);
  }
  template <Format kFormat>
  static __device__ __forceinline__ void store_plain(char* to, int64_t e, float value) {
    if constexpr (kFormat == Format::kFloat32) {
      reinterpret_cast<float*>(to)[e] = value;
    } else {
      reinterpret_cast<uint16_t*>(to)[e] = bfloat16_from_float(value);
    }
  }

  template <class Kind>
  static __device__ __forceinline__ float loaded_code(const StepRecord& at, int s, int64_t e) {
    const float scale = reinterpret_cast<const float*>(at.state[s].extra)[e / kBlock];
    return decode_any<Kind>(reinterpret_cast<const typename Kind::Code*>(at.state[s].data)[e], scale);
  }
  static __device__ __forceinline__ float loaded_state(const StepRecord& at, int s, int64_t e) {
    if constexpr (kCodes) {
      return is_squared(s) ? loaded_code<SquaredCode>(at, s, e) : loaded_code<SignedCode>(at, s, e);
    } else {
      return loaded_plain<kState>(at.state[s].data, e);
    }
  }

  // Where a lane's element k is. Lanes that must not be wide take turns, unless a block's codes depend on their order.
  static __device__ __forceinline__ int64_t element(int64_t first, unsigned team, bool wide, int k) {
    const int lane = static_cast<int>(lane_of(team));
    if (!kCodes && !wide) return first + k * team + lane;
    return first + k / kUnit * kUnitStride + lane * kUnit + k % kUnit;
  }

  // The rare way: element by element, in place. What is beyond the parameter's end counts as 0 in its block.
  static __device__ __forceinline__ void update_exactly(const StepKernelJob& job, int param, int64_t first,
                                                        unsigned team, bool wide, Prepared& prepared) {
#pragma unroll 1
    for (int k = 0; k < kElements; ++k) {
      const StepRecord at = pointers_of(job, param);
      const Rule rule = rule_of(job, param);
      const float factor = treatment_of(job).factor;
      const int64_t e = element(first, team, wide, k);
      float own[kMaxStates] = {};
      if (e < at.numel) {
        float value = loaded_param(at, e);
#pragma unroll
        for (int s = 0; s < kStates; ++s) own[s] = loaded_state(at, s, e);
        rule(value, factor * loaded_plain<kGrad>(at.grad, e), own);
        store_param(at, e, value);
      }
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        if constexpr (kCodes) {
          const float to_code = is_squared(s) ? SquaredCode::prepare(own[s]) : own[s];
#pragma unroll
          for (int j = 0; j < kElements; ++j) {
            if (j == k) prepared.value[s][j] = to_code;
          }
        } else if (e < at.numel) {
          store_plain<kState>(at.state[s].data, e, own[s]);
        }
      }
    }
  }

  // SignedCode::encode and SquaredCode::encode for finite values. Whatever is below 2^-100 of a step gets code 0, as
  // 2^-100 itself does.
  static __device__ __forceinline__ uint32_t encoded(SignedCode, float value, float factor) {
    const float steps = fmaxf(bits_as<float>(magnitude_bits(value)) * factor, 7.8886090522e-31f);
    const float root = square_root_of_positive(steps);
    return nearest_integer_bits(bits_as<float>(bits_as<uint32_t>(root) | (bits_as<uint32_t>(value) & 0x80000000u)));
  }
  static __device__ __forceinline__ uint32_t encoded(SquaredCode, float root, float factor) {
    return nearest_integer_bits(fmaxf(root * factor, root > 0 ? 1.0f : 0.0f));
  }

  // A state's block, which the warp has: all lanes call it. What is beyond the parameter's end counts as 0.
  template <class Kind>
  static __device__ __forceinline__ void encode(Raw& raw, int s, const float (&prepared)[kElements]) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kElements; ++k) largest = larger_bits(largest, magnitude_bits(prepared[k]));
    largest = __reduce_max_sync(kAllLanes, largest);
    const bool is_special = largest >= kInfinity;  // the same for all lanes
    if (is_special) {
      largest = 0;
#pragma unroll
      for (int k = 0; k < kElements; ++k) largest = larger_bits(largest, finite_magnitude(prepared[k]));
      largest = __reduce_max_sync(kAllLanes, largest);
    }
    const float scale = Kind::scale_of(largest);
    const float factor = Kind::factor_of(scale);
#pragma unroll
    for (int k = 0; k < kElements; k += 4) {
      uint32_t code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) code[j] = encoded(Kind(), prepared[k + j], factor);
      raw.state[s][k / 4] = four_bytes<0>(code[0], code[1], code[2], code[3]);
    }
    if (is_special) {
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        const uint32_t magnitude = magnitude_bits(prepared[k]), shift = 8 * (k % 4);
        if (magnitude < kInfinity) continue;
        const auto code = static_cast<uint8_t>(magnitude > kInfinity ? Kind::kNan : Kind::infinity(prepared[k]));
        raw.state[s][k / 4] = (raw.state[s][k / 4] & ~(255u << shift)) | static_cast<uint32_t>(code) << shift;
      }
    }
    raw.scale[s] = is_special ? with_special(scale) : scale;
  }

  // Codes of the states, and their scale beside them.
  static __device__ __forceinline__ void encode_states(const StepRecord& to, int64_t first, bool wide, Raw& raw,
                                                       const Prepared& prepared) {
    const int lane = static_cast<int>(lane_of(kWarp));
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (is_squared(s)) {
        encode<SquaredCode>(raw, s, prepared.value[s]);
      } else {
        encode<SignedCode>(raw, s, prepared.value[s]);
      }
      if (wide) {
        store_stream<kStateBytes>(to.state[s].data, first + lane * kUnit, raw.state[s]);
      } else {
#pragma unroll
        for (int k = 0; k < kElements; ++k) {
          const int64_t e = element(first, kWarp, wide, k);
          if (e < to.numel) to.state[s].data[e] = static_cast<char>(byte_of(raw.state[s], k));
        }
      }
      if (lane == 0) {
        const uint32_t word[1] = {bits_as<uint32_t>(raw.scale[s])};
        store_vector<1>(to.state[s].extra + first / kBlock * 4, word);
      }
    }
  }

  // What gradients become. Treated ones are read again: they are rarely asked for, and registers are scarce.
  static __device__ __forceinline__ void leave_grads(const StepRecord& at, const LaneTreatment& treatment,
                                                     int64_t first, unsigned team, bool wide) {
    if (wide && treatment.after == GradAfter::kZero) {
      const uint32_t zeros[kElements * kGradBytes / 4] = {};
      return store_stream<kGradBytes>(at.grad, first + lane_of(team) * kUnit, zeros);
    }
#pragma unroll 1
    for (int k = 0; k < kElements; ++k) {
      const int64_t e = element(first, team, wide, k);
      if (e >= at.numel) continue;
      const float grad =
          treatment.after == GradAfter::kZero ? 0.0f : treatment.factor * loaded_plain<kGrad>(at.grad, e);
      store_plain<kGrad>(at.grad, e, grad);
    }
  }

  // A team's kElements per lane from `first` on; false if there are none.
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
        is_computed = compute(rule_of(job, param), treatment_of(job).factor, raw, prepared);
        if (is_computed) {
          const StepRecord to = pointers_of(job, param);
          store_stream<kParamBytes>(to.param, i, raw.param);
          if constexpr (kPairs) store_stream<kExtraBytes>(to.param_extra, i, raw.extra);
          if constexpr (!kCodes) {
#pragma unroll
            for (int s = 0; s < kStates; ++s) store_stream<kStateBytes>(to.state[s].data, i, raw.state[s]);
          }
        }
      }
      if (!is_computed) update_exactly(job, param, first, team, wide, prepared);
      if constexpr (kCodes) encode_states(pointers_of(job, param), first, wide, raw, prepared);
    }
    const LaneTreatment treatment = treatment_of(job);
    if (treatment.after != GradAfter::kKeep) leave_grads(pointers_of(job, param), treatment, first, team, wide);
    return true;
  }

  static __device__ __forceinline__ void run(const StepKernelJob& job) {
    const LaneTreatment treatment = treatment_of(job);
    if (treatment.skips && treatment.after != GradAfter::kZero) return;
    const int block = static_cast<int>(blockIdx.x);
    const unsigned thread = threadIdx.x;
    const StepItem item = load_aligned(job.items + find_item(job.items, job.num_items, block));
    int param = item.first_param;
    // A team of lanes has the elements [first, end), at strides where the block has more than one tile.
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
      update(job, param, first, team, treatment.skips);
    } else {
      const int stride = (item.num_params > 0 ? kTeam : kStepThreads) * kElements;
#pragma unroll 1
      for (; first < end; first += stride) {
        if (!update(job, param, first, team, treatment.skips)) return;
      }
    }
  }
};

// As many as leave 5, 4 and 4 blocks to a multiprocessor, or more where blocks are smaller there.
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
