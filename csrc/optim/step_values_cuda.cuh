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
  using Base::kUnitStride;
  using typename Base::Raw;
  using typename Base::Rule;

  // Pointers are read from the record where they are used. That costs a load from the nearest cache and saves
  // registers. `i` is the lane's first element.

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

  // Returns whether the team's elements from `first` on all exist and all arrays are aligned for wide loads.
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

  // Loads gradients last: all results depend on them, so no value is used before all loads are issued.
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
      const int32_t remainder = static_cast<int8_t>(byte_of(raw.extra, k));
      return bits_as<float>(widened_bfloat16(raw.param, k) + static_cast<uint32_t>(remainder * 256));
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
};

}  // namespace drivetrain::optim
