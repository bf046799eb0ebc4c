// What a warp reads of 256 neighboring elements of a parameter, its gradient and its states: 8 values for each thread,
// of whatever format, loaded as they lie in memory before the first is converted. Includes no torch header.
//
// A thread owns two quads of neighboring elements, which meet the slots of grad/lanes.h that are its own. A row is also
// a block of 8-bit codes, whose scale is the same for all threads.
#pragma once

#include <cstdint>

#include "base/wide_cuda.cuh"
#include "formats/decode_cuda.cuh"
#include "formats/summation_cuda.cuh"
#include "optim/step.h"

namespace drivetrain::optim {

using grad::kQuad;
constexpr int kRow = kBlock;
constexpr int kQuads = kRow / grad::kSlots;  // of a thread

// The position in a row of the first element of the thread's quad q.
__device__ inline int quad_position(int q) { return q * grad::kSlots + grad::lane_of_thread() * kQuad; }

// What a step's treatment says, wherever it lies.
__device__ inline bool skips_step(const StepJob& job) {
  return job.treatment_on_device != nullptr ? job.treatment_on_device->skips : job.treatment.skips;
}
__device__ inline double factor_of_gradients(const StepJob& job) {
  return job.treatment_on_device != nullptr ? job.treatment_on_device->factor : job.treatment.factor;
}

// The arguments of a rule, 8 bytes at a time: the compiler would load what lies there as bytes one by one.
template <class Args>
__device__ __forceinline__ Args load_args(const RuleArgs& rule) {
  static_assert(sizeof(Args) % 8 == 0 && alignof(RuleArgs) % 8 == 0);
  uint32_t words[sizeof(Args) / 4];
#pragma unroll
  for (size_t i = 0; i < sizeof(Args); i += 8) {
    uint32_t part[2];
    load_wide(rule.bytes + i, part);
    words[i / 4] = part[0];
    words[i / 4 + 1] = part[1];
  }
  Args args;
  memcpy(&args, words, sizeof(args));
  return args;
}

// Bytes of what stands beside each value.
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

// Whether a thread's quads of rows can be loaded at once.
__device__ inline bool has_wide_quads(const Stream& stream) {
  return stream.format != Format::kFloat64 && stream.format != Format::kFactored &&
         is_aligned(stream.data, kWideBytes) && is_aligned(stream.extra, kWideBytes);
}

// A thread's quads of a stream as they lie in memory.
template <bool kHasExtra>
struct RawQuads {
  uint32_t data[kQuads][kQuad];
  uint32_t extra[kHasExtra ? kQuads : 1][kQuad];
  float scale[kQuads];  // of a block's codes, or of a row of a matrix

  // row: its first element. The whole of it must be there.
  __device__ __forceinline__ void load(const Stream& stream, int64_t row) {
    load_quads(stream.data, static_cast<int>(bytes_of(stream.format)), row, data);
    if constexpr (kHasExtra) load_quads(stream.extra, bytes_beside(stream.format), row, extra);
    if (has_blocks(stream.format)) scale[0] = static_cast<const float*>(stream.extra)[row / kBlock];
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
  // The quads, of elements of so many bytes, one load each.
  static __device__ __forceinline__ void load_quads(const void* from, int bytes, int64_t row,
                                                    uint32_t (&quads)[kQuads][kQuad]) {
    const int64_t first = row + grad::lane_of_thread() * kQuad;
    const auto load = [&]<int kBytes>() {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        uint32_t words[kBytes];  // kQuad elements
        load_wide(static_cast<const char*>(from) + (first + q * grad::kSlots) * kBytes, words);
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
__device__ float load_code(const Stream& stream, int64_t i) {
  const auto code = static_cast<const typename Kind::Code*>(stream.data)[i];
  const float scale = static_cast<const float*>(stream.extra)[i / kBlock];
  return has_special(scale) ? decode_any<Kind>(code, scale) : Kind::decode(code, Kind::unit_of(scale));
}

// One element of any format that a parameter, a gradient or a state has, except kFactored.
template <class T>
__device__ T load_element(const Stream& stream, int64_t i) {
  const auto* halves = static_cast<const uint16_t*>(stream.data);
  if constexpr (sizeof(T) == sizeof(float)) {
    switch (stream.format) {
      case Format::kBFloat16Stochastic:
        return float_from_bfloat16(halves[i]);
      case Format::kFloat16Stochastic:
        return float_from_float16(halves[i]);
      case Format::kBFloat16Remainder16:
        return join(halves[i], static_cast<const int16_t*>(stream.extra)[i]);
      case Format::kBFloat16Remainder8:
        return join8(halves[i], static_cast<const int8_t*>(stream.extra)[i]);
      case Format::kBFloat16Kahan:
        return compensated_bfloat16(halves[i], static_cast<const uint16_t*>(stream.extra)[i]);
      case Format::kFloat16Kahan:
        return compensated_float16(halves[i], static_cast<const uint16_t*>(stream.extra)[i]);
      case Format::kFloat16Master:
        return master_of(static_cast<const float*>(stream.extra)[i], halves[i]);
      case Format::kSigned8:
        return load_code<SignedCode>(stream, i);
      case Format::kSquared8:
        return load_code<SquaredCode>(stream, i);
      default:
        break;
    }
  }
  switch (stream.format) {
    case Format::kFloat64:
      return static_cast<T>(static_cast<const double*>(stream.data)[i]);
    case Format::kBFloat16:
      return static_cast<T>(float_from_bfloat16(halves[i]));
    case Format::kFloat16:
      return static_cast<T>(float_from_float16(halves[i]));
    default:
      return static_cast<T>(static_cast<const float*>(stream.data)[i]);
  }
}

// How often `size` fits into a position below size + kRow: mostly known without a division.
__device__ inline int64_t times_in_row(int64_t position, int64_t size) {
  return size >= kRow ? position >= size : static_cast<uint32_t>(position) / static_cast<uint32_t>(size);
}

// Where the factors of a row's elements lie, for a parameter whose matrices have a state as rows and columns.
class FactorPlaces {
 public:
  // base: the row's first element.
  __device__ __forceinline__ FactorPlaces(const ParamJob& param, int64_t base)
      : rows_(param.rows), columns_(param.columns) {
    row_ = base / columns_;
    column_ = base - row_ * columns_;
    matrix_ = row_ / rows_;
    row_of_matrix_ = row_ - matrix_ * rows_;
  }

  struct Place {
    int64_t row, column;  // counted through all matrices
  };
  __device__ __forceinline__ Place of(int position) const {
    const int64_t more_rows = times_in_row(column_ + position, columns_);
    const int64_t more_matrices = times_in_row(row_of_matrix_ + more_rows, rows_);
    return {row_ + more_rows, (matrix_ + more_matrices - more_rows) * columns_ + column_ + position};
  }

 private:
  int64_t rows_, columns_, row_, column_, matrix_, row_of_matrix_;
};

template <class Rule>
concept FactorsMatrices = requires { Rule::kFactorsMatrices; };

// What a rule reads of a row: loaded as it lies in memory where that can be done at once, and converted quad by quad.
template <class Rule, class T>
class RuleRow {
 public:
  static constexpr int kStates = Rule::kNumStates > 0 ? Rule::kNumStates : 1;

  // Whether a parameter's rows can be loaded at once, as far as they are whole.
  static __device__ bool is_wide(const ParamJob& param) {
    bool result = sizeof(T) == sizeof(float) && has_wide_quads(param.param) && has_wide_quads(param.grad);
#pragma unroll
    for (int s = 0; s < Rule::kNumStates; ++s) {
      result = result && (is_factored(param.state[s]) || has_wide_quads(param.state[s]));
    }
    return result;
  }

  // end: of the parameter's elements.
  __device__ __forceinline__ void load(const ParamJob& param, bool is_wide, int64_t base, int64_t end) {
    base_ = base;
    end_ = end;
    is_raw_ = sizeof(T) == sizeof(float) && is_wide && base + kRow <= end;
    if (!is_raw_) return;
    param_.load(param.param, base);
    grad_.load(param.grad, base);
#pragma unroll
    for (int s = 0; s < Rule::kNumStates; ++s) {
      if (!is_factored(param.state[s])) {
        state_[s].load(param.state[s], base);
      } else if (param.columns % kQuad == 0) {
        load_factors(param, s);
      }
    }
  }

  // The values of the thread's quad q, zeros beyond the end.
  __device__ __forceinline__ void get(const ParamJob& param, int q, T (&value)[kQuad], T (&grad)[kQuad],
                                      T (&state)[kStates][kQuad]) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      if (is_raw_) return decode(param, q, value, grad, state);
    }
    get_one_by_one([&](int64_t i) { return load_element<T>(param.param, i); }, q, value);
    get_one_by_one([&](int64_t i) { return load_element<T>(param.grad, i); }, q, grad);
#pragma unroll
    for (int s = 0; s < Rule::kNumStates; ++s) {
      if (is_factored(param.state[s])) {
        get_products(param, s, q, state[s]);
      } else {
        get_one_by_one([&](int64_t i) { return load_element<T>(param.state[s], i); }, q, state[s]);
      }
    }
  }

 private:
  static __device__ __forceinline__ bool is_factored(const Stream& state) {
    if constexpr (FactorsMatrices<Rule>) return state.format == Format::kFactored;
    return false;
  }

  __device__ __forceinline__ void decode(const ParamJob& param, int q, float (&value)[kQuad], float (&grad)[kQuad],
                                         float (&state)[kStates][kQuad]) const {
    param_.decode(param.param.format, q, value);
    grad_.decode(param.grad.format, q, grad);
#pragma unroll
    for (int s = 0; s < Rule::kNumStates; ++s) {
      if (!is_factored(param.state[s])) {
        state_[s].decode(param.state[s].format, q, state[s]);
      } else if (param.columns % kQuad == 0) {
#pragma unroll
        for (int k = 0; k < kQuad; ++k) state[s][k] = state_[s].scale[q] * bits_as<float>(state_[s].data[q][k]);
      } else {
        get_products(param, s, q, state[s]);
      }
    }
  }

  // Of a matrix with a multiple of kQuad columns: a quad lies in one row of it.
  __device__ __forceinline__ void load_factors(const ParamJob& param, int s) {
    const FactorPlaces places(param, base_);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const auto place = places.of(quad_position(q));
      load_wide(static_cast<const float*>(param.state[s].extra) + place.column, state_[s].data[q]);
      state_[s].scale[q] = static_cast<const float*>(param.state[s].data)[place.row];
    }
  }

  __device__ __forceinline__ void get_products(const ParamJob& param, int s, int q, T (&products)[kQuad]) const {
    const FactorPlaces places(param, base_);
    get_one_by_one(
        [&](int64_t i) {
          const auto place = places.of(static_cast<int>(i - base_));
          return static_cast<const T*>(param.state[s].data)[place.row] *
                 static_cast<const T*>(param.state[s].extra)[place.column];
        },
        q, products);
  }

  template <class Load>
  __device__ __forceinline__ void get_one_by_one(Load load, int q, T (&values)[kQuad]) const {
    // Not unrolled, and so through selects: an index would put the values into local memory.
#pragma unroll 1
    for (int at = 0; at < kQuad; ++at) {
      const int64_t i = base_ + quad_position(q) + at;
      const T value = i < end_ ? load(i) : T(0);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) values[k] = k == at ? value : values[k];
    }
  }

  int64_t base_, end_;
  bool is_raw_;
  RawQuads<true> param_;
  RawQuads<false> grad_, state_[kStates];
};

}  // namespace drivetrain::optim
