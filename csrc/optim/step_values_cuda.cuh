// Loads and stores the elements of a lane, and converts them between memory and float. Includes no torch header.
#pragma once

#include "optim/step_layout_cuda.cuh"

namespace drivetrain::optim {

template <template <class> class RuleOf, Format kParam, Format kGrad, Format kState>
struct StepMemory : StepLayout<RuleOf, kParam, kGrad, kState> {
  using Base = StepLayout<RuleOf, kParam, kGrad, kState>;
  using Base::kCodes;
  using Base::kElements;
  using Base::kExtraBytes;
  using Base::kGradBytes;
  using Base::kPairs;
  using Base::kParamBytes;
  using Base::kStateBytes;
  using Base::kStates;
  using Base::kUnit;
  using Base::kUnits;
  using typename Base::Raw;
  using typename Base::Rule;

  // The record in shared memory is read where it is used. That costs one instruction per 16 bytes and saves registers.

  template <int kBegin, int kBytes>
  static __device__ __forceinline__ void read_record(const StepRecord* own, void* to) {
    uint32_t words[kBytes / 4];
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) reload_shared(reinterpret_cast<const char*>(own) + kBegin + i, words + i / 4);
    std::memcpy(to, words, kBytes);
  }

  struct Head {
    uint32_t units, whole_units;
    float factor;
    uint32_t flags;
    __device__ __forceinline__ GradAfter after() const { return static_cast<GradAfter>(flags & 0xffu); }
    __device__ __forceinline__ bool skips() const { return (flags & 0xff00u) != 0; }
    // Returns whether the elements of a lane whose first unit this is allow wide accesses.
    __device__ __forceinline__ bool is_wide(uint32_t unit) const {
      return kept_as_is(unit) + (kUnits - 1) * kWarp < whole_units;
    }
  };
  static __device__ __forceinline__ Head head_of(const StepRecord* own) {
    static_assert(sizeof(Head) == offsetof(StepRecord, param) && offsetof(StepRecord, factor) == 8 &&
                  offsetof(StepRecord, after) == 12 && offsetof(StepRecord, skips) == 13);
    Head head;
    read_record<0, sizeof(Head)>(own, &head);
    return head;
  }

  struct Pointers {
    char *param, *param_extra;
    StepRecord::State state[kMaxStatesOfKernels];
    char* grad;
    int64_t numel;
  };
  static __device__ __forceinline__ Pointers pointers_of(const StepRecord* own) {
    static_assert(offsetof(StepRecord, param) + sizeof(Pointers) == offsetof(StepRecord, rule));
    Pointers pointers;
    read_record<offsetof(StepRecord, param), sizeof(Pointers)>(own, &pointers);
    return pointers;
  }

  static __device__ __forceinline__ Rule rule_of(const StepRecord* own) {
    struct {
      uint32_t words[(sizeof(Rule) + 15) / 16 * 4];
    } bits;
    read_record<offsetof(StepRecord, rule), sizeof(bits)>(own, &bits);
    Rule rule;
    std::memcpy(&rule, &bits, sizeof(rule));
    return rule;
  }

  // Returns the index of a lane's element k, whose first unit is number `unit` of the parameter.
  static __device__ __forceinline__ int64_t element(uint32_t unit, int k) {
    return static_cast<int64_t>(unit + k / kUnit * kWarp) * kUnit + k % kUnit;
  }

  // Load and store a lane's elements of one array; `numel` counts the parameter's.
  template <int kBytes, bool kIsWide>
  static __device__ __forceinline__ void load_stream(const char* from, uint32_t unit, int64_t numel, uint32_t* words) {
    from += static_cast<uint64_t>(unit) * (kUnit * kBytes);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const char* const of_unit = from + u * (kWarp * kUnit * kBytes);
      uint32_t part[kUnit * kBytes / 4];
      if constexpr (kIsWide) {
        load_wide(of_unit, part);
      } else {
        load_narrow<kBytes>(of_unit, numel - element(unit, u * kUnit), part);
      }
#pragma unroll
      for (int i = 0; i < kUnit * kBytes / 4; ++i) words[u * (kUnit * kBytes / 4) + i] = part[i];
    }
  }
  template <int kBytes, bool kIsWide>
  static __device__ __forceinline__ void store_stream(char* to, uint32_t unit, int64_t numel, const uint32_t* words) {
    to += static_cast<uint64_t>(unit) * (kUnit * kBytes);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      char* const of_unit = to + u * (kWarp * kUnit * kBytes);
      uint32_t part[kUnit * kBytes / 4];
#pragma unroll
      for (int i = 0; i < kUnit * kBytes / 4; ++i) part[i] = words[u * (kUnit * kBytes / 4) + i];
      if constexpr (kIsWide) {
        store_wide(of_unit, part);
      } else {
        store_narrow<kBytes>(of_unit, numel - element(unit, u * kUnit), part);
      }
    }
  }

  // Loads gradients last: all results depend on them, so no value is used before all loads are issued.
  template <bool kIsWide>
  static __device__ __forceinline__ void load(const StepRecord* own, uint32_t unit, Raw& raw) {
    Pointers at = pointers_of(own);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if constexpr (!kIsWide) at = pointers_of(own);
      load_stream<kStateBytes, kIsWide>(at.state[s].data, unit, at.numel, raw.state[s]);
      if constexpr (kCodes) {
        uint32_t word[1];
        load_vector<1>(at.state[s].extra + static_cast<uint64_t>(unit / (kUnits * kWarp)) * 4, word);
        raw.scale[s] = bits_as<float>(word[0]);
      }
    }
    if constexpr (!kIsWide) at = pointers_of(own);
    load_stream<kParamBytes, kIsWide>(at.param, unit, at.numel, raw.param);
    if constexpr (kPairs) load_stream<kExtraBytes, kIsWide>(at.param_extra, unit, at.numel, raw.extra);
    if constexpr (!kIsWide) at = pointers_of(own);
    load_stream<kGradBytes, kIsWide>(at.grad, unit, at.numel, raw.grad);
  }

  // Stores all but states with codes.
  template <bool kIsWide>
  static __device__ __forceinline__ void store(const StepRecord* own, uint32_t unit, const Raw& raw) {
    const Pointers to = pointers_of(own);
    store_stream<kParamBytes, kIsWide>(to.param, unit, to.numel, raw.param);
    if constexpr (kPairs) store_stream<kExtraBytes, kIsWide>(to.param_extra, unit, to.numel, raw.extra);
    if constexpr (!kCodes) {
#pragma unroll
      for (int s = 0; s < kStates; ++s)
        store_stream<kStateBytes, kIsWide>(to.state[s].data, unit, to.numel, raw.state[s]);
    }
  }
};

template <template <class> class RuleOf, Format kParam, Format kGrad, Format kState>
struct StepValues : StepMemory<RuleOf, kParam, kGrad, kState> {
  using Base = StepMemory<RuleOf, kParam, kGrad, kState>;
  using Base::is_squared;
  using Base::kCodes;
  using typename Base::Raw;

  // Converts words to values and back for usual values; compute() detects others.

  // Returns NaN where the remainder belongs to an earlier half (see storage.h), and the half where a master does.
  static __device__ __forceinline__ float param_value(const Raw& raw, int k) {
    if constexpr (kParam == Format::kBFloat16Remainder16) {
      const int32_t remainder = static_cast<int16_t>(half_of(raw.extra, k));
      return bits_as<float>(widened_bfloat16(raw.param, k) + static_cast<uint32_t>(remainder));
    } else if constexpr (kParam == Format::kBFloat16Remainder8) {
      return bits_as<float>(widened_bfloat16(raw.param, k) + widened_byte(raw.extra, k));
    } else if constexpr (kParam == Format::kFloat16Master) {
      const float master = bits_as<float>(raw.extra[k]);
      const bool belongs = static_cast<uint16_t>(pack_float16(master, master)) == half_of(raw.param, k);
      return belongs ? master : float16_of(raw.param, k);
    } else {
      return bits_as<float>(kParam == Format::kFloat32 ? raw.param[k] : widened_bfloat16(raw.param, k));
    }
  }

  static __device__ __forceinline__ float grad_value(const Raw& raw, int k) {
    if constexpr (kGrad == Format::kFloat16) return float16_of(raw.grad, k);
    return bits_as<float>(kGrad == Format::kFloat32 ? raw.grad[k] : widened_bfloat16(raw.grad, k));
  }

  // Decodes as SignedCode::decode and SquaredCode::decode do.
  static __device__ __forceinline__ float state_value(const Raw& raw, int s, int k) {
    if constexpr (kCodes) {
      const float scale = fabsf(raw.scale[s]);
      if (is_squared(s)) {
        const float root = unsigned_byte_of(raw.state[s], k) * SquaredCode::unit_of(scale);
        return root * root;
      }
      const float number = signed_byte_of(raw.state[s], k);
      return number * fabsf(number) * SignedCode::unit_of(scale);
    } else {
      return bits_as<float>(kState == Format::kFloat32 ? raw.state[s][k] : widened_bfloat16(raw.state[s], k));
    }
  }

  // Stores elements [first, first + 4).
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
    } else if constexpr (kParam == Format::kFloat16Master) {
#pragma unroll
      for (int k = 0; k < 4; ++k) raw.extra[first + k] = bits[k];
      raw.param[first / 2] = pack_float16(values[0], values[1]);
      raw.param[first / 2 + 1] = pack_float16(values[2], values[3]);
    } else {
      if constexpr (kParam == Format::kBFloat16Remainder16) {
        raw.extra[first / 2] = low_halves(bits[0], bits[1]);
        raw.extra[first / 2 + 1] = low_halves(bits[2], bits[3]);
      } else {
        // Rounded to 24 bits, but for the last byte, which is left out and which adding 0x8000 does not carry from.
#pragma unroll
        for (int k = 0; k < 4; ++k) bits[k] = kept_as_is(bits[k] + ((bits[k] >> 8) & 1u) + 0x7fu);
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
};

}  // namespace drivetrain::optim
