// Updates elements one by one with the bits of the CPU, and encodes states of 8 bits. Includes no torch header.
#pragma once

#include "optim/step_values_cuda.cuh"

namespace drivetrain::optim {

template <template <class> class RuleOf, Format kParam, Format kGrad, Format kState>
struct StepExact : StepValues<RuleOf, kParam, kGrad, kState> {
  using Base = StepValues<RuleOf, kParam, kGrad, kState>;
  using Base::element;
  using Base::head_of;
  using Base::is_squared;
  using Base::kCodes;
  using Base::kElements;
  using Base::kStates;
  using Base::pointers_of;
  using Base::rule_of;
  using typename Base::Pointers;
  using typename Base::Prepared;
  using typename Base::Rule;

  // Loads and stores one element with the bits of the CPU, for any value and alignment.

  static __device__ __forceinline__ float loaded_param(const Pointers& at, int64_t e) {
    if constexpr (kParam == Format::kFloat32) return reinterpret_cast<const float*>(at.param)[e];
    const uint16_t half = reinterpret_cast<const uint16_t*>(at.param)[e];
    if constexpr (kParam == Format::kBFloat16) return float_from_bfloat16(half);
    if constexpr (kParam == Format::kFloat16Master) {
      return master_of(reinterpret_cast<const float*>(at.param_extra)[e], half);
    }
    if constexpr (kParam == Format::kBFloat16Remainder16) {
      return join(half, reinterpret_cast<const int16_t*>(at.param_extra)[e]);
    }
    return join8(half, reinterpret_cast<const int8_t*>(at.param_extra)[e]);
  }
  static __device__ __forceinline__ void store_param(const Pointers& at, int64_t e, float value) {
    auto& half = reinterpret_cast<uint16_t*>(at.param)[e];
    if constexpr (kParam == Format::kFloat32) {
      reinterpret_cast<float*>(at.param)[e] = value;
    } else if constexpr (kParam == Format::kBFloat16) {
      half = bfloat16_from_float(value);
    } else if constexpr (kParam == Format::kFloat16Master) {
      half = float16_from_float(value);
      reinterpret_cast<float*>(at.param_extra)[e] = value;
    } else if constexpr (kParam == Format::kBFloat16Remainder16) {
      split_into(value, half, reinterpret_cast<int16_t*>(at.param_extra)[e]);
    } else {
      split_into(value, half, reinterpret_cast<int8_t*>(at.param_extra)[e]);
    }
  }

  template <Format kFormat>
  static __device__ __forceinline__ float loaded_plain(const char* from, int64_t e) {
    if constexpr (kFormat == Format::kFloat32) return reinterpret_cast<const float*>(from)[e];
    const uint16_t half = reinterpret_cast<const uint16_t*>(from)[e];
    return kFormat == Format::kFloat16 ? float_from_float16(half) : float_from_bfloat16(half);
  }
  template <Format kFormat>
  static __device__ __forceinline__ void store_plain(char* to, int64_t e, float value) {
    if constexpr (kFormat == Format::kFloat32) {
      reinterpret_cast<float*>(to)[e] = value;
    } else {
      reinterpret_cast<uint16_t*>(to)[e] =
          kFormat == Format::kFloat16 ? float16_from_float(value) : bfloat16_from_float(value);
    }
  }

  template <class Kind>
  static __device__ __forceinline__ float loaded_code(const Pointers& at, int s, int64_t e) {
    const float scale = reinterpret_cast<const float*>(at.state[s].extra)[e / kBlock];
    return decode_any<Kind>(reinterpret_cast<const typename Kind::Code*>(at.state[s].data)[e], scale);
  }
  static __device__ __forceinline__ float loaded_state(const Pointers& at, int s, int64_t e) {
    if constexpr (kCodes) {
      return is_squared(s) ? loaded_code<SquaredCode>(at, s, e) : loaded_code<SignedCode>(at, s, e);
    } else {
      return loaded_plain<kState>(at.state[s].data, e);
    }
  }

  // Updates element by element, in place, in rare cases. Elements beyond the parameter's end count as 0 in their block.
  static __device__ __forceinline__ void update_exactly(const StepRecord* own, uint32_t unit, Prepared& prepared) {
#pragma unroll 1
    for (int k = 0; k < kElements; ++k) {
      const Pointers at = pointers_of(own);
      const Rule rule = rule_of(own);
      const int64_t e = element(unit, k);
      float state[kMaxStates] = {};
      if (e < at.numel) {
        float value = loaded_param(at, e);
#pragma unroll
        for (int s = 0; s < kStates; ++s) state[s] = loaded_state(at, s, e);
        rule(value, head_of(own).factor * loaded_plain<kGrad>(at.grad, e), state);
        store_param(at, e, value);
      }
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        if constexpr (kCodes) {
          const float to_code = is_squared(s) ? SquaredCode::prepare(state[s]) : state[s];
#pragma unroll
          for (int j = 0; j < kElements; ++j) {
            if (j == k) prepared.value[s][j] = to_code;
          }
        } else if (e < at.numel) {
          store_plain<kState>(at.state[s].data, e, state[s]);
        }
      }
    }
  }
};

template <template <class> class RuleOf, Format kParam, Format kGrad, Format kState>
struct StepCodes : StepExact<RuleOf, kParam, kGrad, kState> {
  using Base = StepExact<RuleOf, kParam, kGrad, kState>;
  using Base::is_squared;
  using Base::kElements;
  using Base::kStateBytes;
  using Base::kStates;
  using Base::kUnits;
  using typename Base::Prepared;
  using typename Base::Raw;

  // Encode finite values as SignedCode::encode and SquaredCode::encode do. Values below 2^-100 of a step get code 0, as
  // 2^-100 itself does.
  static __device__ __forceinline__ uint32_t encoded(SignedCode, float value, float factor) {
    const float steps = fmaxf(bits_as<float>(magnitude_bits(value)) * factor, 7.8886090522e-31f);
    const float root = square_root_of_positive(steps);
    return nearest_integer_bits(bits_as<float>(bits_as<uint32_t>(root) | (bits_as<uint32_t>(value) & 0x80000000u)));
  }
  static __device__ __forceinline__ uint32_t encoded(SquaredCode, float root, float factor) {
    return nearest_integer_bits(fmaxf(root * factor, root > 0 ? 1.0f : 0.0f));
  }

  // Encodes a warp's block of a state; all lanes call it. Elements beyond the parameter's end count as 0.
  template <class Kind>
  static __device__ __forceinline__ void encode(Raw& raw, int s, const float (&prepared)[kElements]) {
    // Roots have no sign.
    constexpr bool kHasSigns = std::is_same_v<Kind, SignedCode>;
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kElements; ++k)
      largest = larger_bits(largest, kHasSigns ? magnitude_bits(prepared[k]) : bits_as<uint32_t>(prepared[k]));
    largest = __reduce_max_sync(kAllLanes, largest);
    const bool is_special = largest >= kInfinity;  // equal for all lanes
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

  // Stores the codes of all states and their scales.
  static __device__ __forceinline__ void encode_states(const StepRecord* own, uint32_t unit, Raw& raw,
                                                       const Prepared& prepared) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (is_squared(s)) {
        encode<SquaredCode>(raw, s, prepared.value[s]);
      } else {
        encode<SignedCode>(raw, s, prepared.value[s]);
      }
      const auto pointers = Base::pointers_of(own);
      const auto to = pointers.state[s];
      if (Base::head_of(own).is_wide(unit)) {
        Base::template store_stream<kStateBytes, true>(to.data, unit, pointers.numel, raw.state[s]);
      } else {
        Base::template store_stream<kStateBytes, false>(to.data, unit, pointers.numel, raw.state[s]);
      }
      __syncwarp();  // All lanes have read the old scale; __reduce_max_sync orders no memory.
      if (lane_of(kWarp) == 0) {
        const uint32_t word[1] = {bits_as<uint32_t>(raw.scale[s])};
        store_vector<1>(to.extra + static_cast<uint64_t>(unit / (kUnits * kWarp)) * 4, word);
      }
    }
  }
};

}  // namespace drivetrain::optim
