// Loads a row of 256 neighboring elements of a parameter, its gradient and its states for a rule. Includes no torch
// header.
#pragma once

#include <cstdint>

#include "base/wide_cuda.cuh"
#include "formats/row_cuda.cuh"
#include "optim/step.h"

namespace drivetrain::optim {

// Read the step's grad scaling from the device or the host.
__device__ inline bool skips_step(const StepJob& job) {
  return job.grad_scaling_on_device != nullptr ? job.grad_scaling_on_device->skips : job.grad_scaling.skips;
}
__device__ inline double factor_of_gradients(const StepJob& job) {
  return job.grad_scaling_on_device != nullptr ? job.grad_scaling_on_device->factor : job.grad_scaling.factor;
}

// Loads a rule's arguments 8 bytes at a time: the compiler would load an array of bytes one by one.
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

// Divides a position below size + kRow by `size`, mostly without a division.
__device__ inline int64_t times_in_row(int64_t position, int64_t size) {
  return size >= kRow ? position >= size : static_cast<uint32_t>(position) / static_cast<uint32_t>(size);
}

// Finds the factors of a row's elements, for a parameter whose matrices have a state as rows and columns.
class FactorPlaces {
 public:
  // `base` is the row's first element.
  __device__ __forceinline__ FactorPlaces(const ParamJob& param, int64_t base)
      : rows_(param.rows), columns_(param.columns) {
    row_ = base / columns_;
    column_ = base - row_ * columns_;
    matrix_ = row_ / rows_;
    row_of_matrix_ = row_ - matrix_ * rows_;
  }

  struct Place {
    int64_t row, column;  // counted over all matrices
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

// Loads a row of everything that a rule reads, as it lies in memory where wide loads are possible, and converts it quad
// by quad.
template <class Rule, class T>
class RuleRow {
 public:
  static constexpr int kStates = Rule::kNumStates > 0 ? Rule::kNumStates : 1;

  // Returns whether a parameter's whole rows can be loaded with wide loads.
  static __device__ bool is_wide(const ParamJob& param) {
    bool result = sizeof(T) == sizeof(float) && has_wide_quads(param.param) && has_wide_quads(param.grad);
#pragma unroll
    for (int s = 0; s < Rule::kNumStates; ++s) {
      result = result && (is_factored(param.state[s]) || has_wide_quads(param.state[s]));
    }
    return result;
  }

  // `end` is the parameter's number of elements.
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

  // Returns the values of the thread's quad q; zeros stand for elements beyond the end.
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
  static __device__ __forceinline__ bool is_factored(const TypedArray& state) {
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

  // Loads the factors of a matrix with a multiple of kQuad columns: a quad lies in one row of it.
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
    // Selects put the value into its slot, because a run-time index would move the values to local memory.
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
