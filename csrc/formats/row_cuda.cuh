// Loads rows of 256 neighboring elements with a warp, 8 values per thread in any storage format. The loads are issued
// before the first value is converted. Includes no torch header.
//
// A thread owns two quads of neighboring elements, which match its slots of summation.h. A row is also a block of 8-bit
// codes, so its threads share one scale.
#pragma once

#include <cstdint>

#include "base/wide_cuda.cuh"
#include "formats/decode_cuda.cuh"
#include "formats/summation_cuda.cuh"

namespace drivetrain::formats {

constexpr int kRow = kBlock;
constexpr int kQuads = kRow / kSlots;  // quads per thread

// Returns the position in a row of the first element of the thread's quad q.
__device__ inline int quad_position(int q) { return q * kSlots + lane_of_thread() * kQuad; }

// Returns the bytes per element in `extra`.
__device__ inline int bytes_beside(Format format) {
  switch (format) {
    case Format::kBFloat16Remainder8:
      return 1;
    case Format::kBFloat16Remainder16:
    case Format::kBFloat16Kahan:
    case Format::kFloat16Kahan:
      return 2;
    case Format::kFloat16Master:
      return 4;
    default:
      return 0;
  }
}

// Returns whether a thread's quads of whole rows can be loaded with wide loads.
__device__ inline bool has_wide_quads(const TypedArray& array) {
  return array.format != Format::kFloat64 && array.format != Format::kFactored && !is_packed(array.format) &&
         is_aligned(array.data, kWideBytes) && is_aligned(array.extra, kWideBytes);
}

// A thread's quads of an array as they lie in memory.
template <bool kHasExtra>
struct RawQuads {
  uint32_t data[kQuads][kQuad];
  uint32_t extra[kHasExtra ? kQuads : 1][kQuad];
  float scale[kQuads];  // scale of a block's codes, or factor of a matrix row

  // Loads the row whose first element is `row`. The whole row must exist.
  __device__ __forceinline__ void load(const TypedArray& array, int64_t row) {
    load_quads(array.data, static_cast<int>(bytes_of(array.format)), row, data);
    if constexpr (kHasExtra) load_quads(array.extra, bytes_beside(array.format), row, extra);
    if (has_blocks(array.format)) scale[0] = static_cast<const float*>(array.extra)[row / kBlock];
  }

  __device__ __forceinline__ void decode(Format format, int q, float (&values)[kQuad]) const {
    switch (format) {
      case Format::kBFloat16:
      case Format::kBFloat16Stochastic:
        return fill(values, [&](int k) { return bfloat16_of(data[q], k); });
      case Format::kFloat16:
      case Format::kFloat16Stochastic:
        return fill(values, [&](int k) { return float16_of(data[q], k); });
      case Format::kSigned8:
        return decode_codes<SignedCode>(q, values);
      case Format::kSquared8:
        return decode_codes<SquaredCode>(q, values);
      case Format::kSignedFloat8:
        return decode_codes<SignedFloat8>(q, values);
      case Format::kSquaredFloat8:
        return decode_codes<SquaredFloat8>(q, values);
      default:
        break;
    }
    if constexpr (kHasExtra) {
      const auto half = [&](int k) { return half_of(data[q], k); };
      switch (format) {
        case Format::kBFloat16Remainder16:
          return fill(values, [&](int k) { return join(half(k), static_cast<int16_t>(half_of(extra[q], k))); });
        case Format::kBFloat16Remainder8:
          return fill(values, [&](int k) { return join8(half(k), static_cast<int8_t>(byte_of(extra[q], k))); });
        case Format::kBFloat16Kahan:
          return fill(values, [&](int k) { return compensated_bfloat16(half(k), half_of(extra[q], k)); });
        case Format::kFloat16Kahan:
          return fill(values, [&](int k) { return compensated_float16(half(k), half_of(extra[q], k)); });
        case Format::kFloat16Master:
          return fill(values, [&](int k) { return master_of(bits_as<float>(extra[q][k]), half(k)); });
        default:
          break;
      }
    }
    fill(values, [&](int k) { return bits_as<float>(data[q][k]); });
  }

 private:
  // Loads the quads of elements of `bytes` bytes, one load each.
  static __device__ __forceinline__ void load_quads(const void* from, int bytes, int64_t row,
                                                    uint32_t (&quads)[kQuads][kQuad]) {
    const int64_t first = row + lane_of_thread() * kQuad;
    const auto load = [&]<int kBytes>() {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        uint32_t words[kBytes];  // kQuad elements
        load_wide(static_cast<const char*>(from) + (first + q * kSlots) * kBytes, words);
#pragma unroll
        for (int i = 0; i < kBytes; ++i) quads[q][i] = words[i];
      }
    };
    if (bytes == 4) {
      load.template operator()<4>();
    } else if (bytes == 2) {
      load.template operator()<2>();
    } else if (bytes == 1) {
      load.template operator()<1>();
    }
  }

  template <class ValueOf>
  static __device__ __forceinline__ void fill(float (&values)[kQuad], ValueOf value_of) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) values[k] = value_of(k);
  }

  template <class Kind>
  __device__ __forceinline__ void decode_codes(int q, float (&values)[kQuad]) const {
    const float unit = Kind::unit_of(fabsf(scale[0]));
    const auto code = [&](int k) { return static_cast<typename Kind::Code>(byte_of(data[q], k)); };
    fill(values, [&](int k) { return Kind::decode(code(k), unit); });
    if (has_special(scale[0])) fill(values, [&](int k) { return Kind::special(code(k), values[k]); });
  }
};

template <class Kind>
__device__ float load_code(const TypedArray& array, int64_t i) {
  return decode_any<Kind>(code_at<Kind>(array.data, i), static_cast<const float*>(array.extra)[i / Kind::kPerScale]);
}

// Loads one element of a plain format.
template <class T>
__device__ T load_plain_element(const TypedArray& array, int64_t i) {
  const auto* halves = static_cast<const uint16_t*>(array.data);
  switch (array.format) {
    case Format::kFloat64:
      return static_cast<T>(static_cast<const double*>(array.data)[i]);
    case Format::kBFloat16:
      return static_cast<T>(float_from_bfloat16(halves[i]));
    case Format::kFloat16:
      return static_cast<T>(float_from_float16(halves[i]));
    default:
      return static_cast<T>(static_cast<const float*>(array.data)[i]);
  }
}

// Loads one element of any format except kFactored.
template <class T>
__device__ T load_element(const TypedArray& array, int64_t i) {
  const auto* halves = static_cast<const uint16_t*>(array.data);
  if constexpr (sizeof(T) == sizeof(float)) {
    switch (array.format) {
      case Format::kBFloat16Stochastic:
        return float_from_bfloat16(halves[i]);
      case Format::kFloat16Stochastic:
        return float_from_float16(halves[i]);
      case Format::kBFloat16Remainder16:
        return join(halves[i], static_cast<const int16_t*>(array.extra)[i]);
      case Format::kBFloat16Remainder8:
        return join8(halves[i], static_cast<const int8_t*>(array.extra)[i]);
      case Format::kBFloat16Kahan:
        return compensated_bfloat16(halves[i], static_cast<const uint16_t*>(array.extra)[i]);
      case Format::kFloat16Kahan:
        return compensated_float16(halves[i], static_cast<const uint16_t*>(array.extra)[i]);
      case Format::kFloat16Master:
        return master_of(static_cast<const float*>(array.extra)[i], halves[i]);
      case Format::kSigned8:
        return load_code<SignedCode>(array, i);
      case Format::kSquared8:
        return load_code<SquaredCode>(array, i);
      case Format::kSignedFloat8:
        return load_code<SignedFloat8>(array, i);
      case Format::kSquaredFloat8:
        return load_code<SquaredFloat8>(array, i);
      case Format::kSigned4:
        return load_code<Signed4>(array, i);
      case Format::kSquared4:
        return load_code<Squared4>(array, i);
      default:
        break;
    }
  }
  return load_plain_element<T>(array, i);
}

}  // namespace drivetrain::formats
