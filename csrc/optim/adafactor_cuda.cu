// Runs Adafactor's passes over all matrices on CUDA; trust_ratio_cuda.cu and the step have the other passes. See
// adafactor_pass.h. Includes no torch header.
//
// Three passes move 24 bytes per element in float32. factor_sums reads 4, the norms' pass reads 8 (gradient and
// parameter), and the step reads 8 and writes 4. Sums and factors take about 8 bytes per row and column of a unit, 1 %
// of that.
#include "base/block_cuda.cuh"
#include "base/launch_cuda.h"
#include "optim/adafactor_pass.h"
#include "optim/cuda_step.h"
#include "optim/rule_row_cuda.cuh"

namespace drivetrain::optim {
namespace {

using formats::kLanes;

static_assert(kThreads == kStrips * kLanes && kThreads == kUnitColumns && kThreads == kMeanSlots &&
              kStripRows <= kLanes);
static_assert(kUnitColumns == kRow && kBlockRows % kThreads == 0);

// Rows whose squares a warp sums together.
constexpr int kRowsSummed = 4;

// Makes one step of a sum over a warp's threads. A thread passes half of its values to the thread whose lane differs in
// `bit`: `upper` where its own lane lacks the bit, else `lower`.
__device__ __forceinline__ double halve(double lower, double upper, int bit) {
  const bool is_upper = (formats::lane_of_thread() & bit) != 0;
  return (is_upper ? upper : lower) + __shfl_xor_sync(kAllLanes, is_upper ? lower : upper, bit);
}

// Sums the slots of kRowsSummed rows after the first step: pairs of rows, of which threads with bit 16 in their lane
// have the second. 18 exchanges in all replace 80. A thread gets the sum of the row row_of_thread().
__device__ __forceinline__ double sums_of_rows(const double (&pairs)[2][kQuad]) {
  static_assert(kRowsSummed == 4 && kQuad == 4);
  double slots[kQuad];
#pragma unroll
  for (int k = 0; k < kQuad; ++k) slots[k] = halve(pairs[0][k], pairs[1][k], 8);
  double sum = halve(halve(slots[0], slots[2], 4), halve(slots[1], slots[3], 4), 2);
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 4);  // slots k and k + 2
  sum += __shfl_xor_sync(kAllLanes, sum, 2);  // slots 0 and 1
  return sum;
}
__device__ __forceinline__ int row_of_thread() {
  const int lane = formats::lane_of_thread();
  return lane / 16 + lane / 8 % 2 * 2;
}

// A thread's values of a gradient in one format, for sums of type T.
template <Format kFormat, class T>
struct Grads {
  static constexpr int kBytes = bytes_of(kFormat);
  static constexpr bool kIsConverted = kFormat == Format::kFloat64 && sizeof(T) == sizeof(float);
  static constexpr int kRowsAtOnce = kFormat == Format::kBFloat16 || kFormat == Format::kFloat16 ? 8 : 4;
  uint32_t words[kRowsAtOnce][kQuads][kIsConverted ? kQuad : kQuad * kBytes / 4];

  // Loads rows that are bytes_apart bytes apart: the first `rows` of them and `columns` of each. Zeros stand for the
  // rest. kIsWide: a quad exists as a whole or not at all, and is aligned.
  template <bool kIsWide>
  __device__ __forceinline__ void load(const char* data, int64_t bytes_apart, int rows, int columns) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int count = r < rows ? columns - quad_position(q) : 0;
        const char* const from = data + r * bytes_apart + quad_position(q) * kBytes;
        if constexpr (kIsConverted) {
#pragma unroll
          for (int k = 0; k < kQuad; ++k) {
            const T value = k < count ? static_cast<T>(reinterpret_cast<const double*>(from)[k]) : T(0);
            words[r][q][k] = bits_as<uint32_t>(value);
          }
        } else if constexpr (kIsWide) {
#pragma unroll
          for (uint32_t& word : words[r][q]) word = 0;
          if (count > 0) load_wide(from, words[r][q]);
        } else {
          load_narrow<kBytes>(from, count, words[r][q]);
        }
      }
    }
  }

  __device__ __forceinline__ T value(int r, int q, int k) const {
    if constexpr (kFormat == Format::kFloat64 && !kIsConverted) {
      return double_of(words[r][q], k);
    } else if constexpr (kFormat == Format::kBFloat16) {
      return bfloat16_of(words[r][q], k);
    } else if constexpr (kFormat == Format::kFloat16) {
      return float16_of(words[r][q], k);
    } else {
      return bits_as<float>(words[r][q][k]);
    }
  }
};

// Sums a warp's strip: writes the rows' sums, and the columns' sums of low matrices; leaves other columns' sums in
// `sums`.
template <Format kFormat, bool kIsWide, class T>
__device__ __forceinline__ void sum_rows(const Factored& of, const void* data, const Strip& strip, T factor,
                                         double* row_sums, double* column_sums, double (&sums)[kQuads][kQuad]) {
  using Batch = Grads<kFormat, T>;
  const int lane = formats::lane_of_thread();
  const int rows = static_cast<int>(strip.row_end - strip.row_begin);
  const int columns = static_cast<int>(strip.column_end - strip.column_begin);
  const int64_t bytes_apart = of.columns * Batch::kBytes;
  const char* from =
      static_cast<const char*>(data) + strip.row_begin * bytes_apart + strip.column_begin * Batch::kBytes;
  row_sums += strip.row_begin;
  // For low matrices: the address of the columns' sums, and the rows left of the current matrix.
  const bool finishes = is_low(of);
  double* of_matrix = column_sums + strip.row_begin / of.rows * of.columns + strip.column_begin;
  int rows_left = static_cast<int>(of.rows);
#pragma unroll 1
  for (int base = 0; base < rows; base += Batch::kRowsAtOnce, from += Batch::kRowsAtOnce * bytes_apart) {
    Batch grads;
    grads.template load<kIsWide>(from, bytes_apart, rows - base, columns);
#pragma unroll
    for (int first = 0; first < Batch::kRowsAtOnce; first += kRowsSummed) {
      double pairs[2][kQuad], slots[2][kQuad];
#pragma unroll
      for (int r = 0; r < kRowsSummed; ++r) {
        const bool is_there = base + first + r < rows;
        double (&of_row)[kQuad] = slots[r % 2];
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          // Missing elements stay 0, whatever the factor.
          const T own_factor = is_there && quad_position(q) < columns ? factor : T(0);
          T values[kQuad];
#pragma unroll
          for (int k = 0; k < kQuad; ++k) {
            const bool is_zero = !kIsWide && quad_position(q) + k >= columns;
            values[k] = is_zero ? T(0) : own_factor * grads.value(first + r, q, k);
            if (q == 0) of_row[k] = 0;
          }
          formats::add_squares(values, of_row, sums[q]);
        }
        if (r % 2 == 1) {
#pragma unroll
          for (int k = 0; k < kQuad; ++k) pairs[r / 2][k] = halve(slots[0][k], slots[1][k], 16);
        }
        if (!finishes || !is_there || --rows_left > 0) continue;
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
          for (int k = 0; k < kQuad; ++k) {
            if (quad_position(q) + k < columns) of_matrix[quad_position(q) + k] = sums[q][k];
            sums[q][k] = 0;
          }
        }
        of_matrix += of.columns;
        rows_left = static_cast<int>(of.rows);
      }
      const double sum = sums_of_rows(pairs);
      const int row = base + first + row_of_thread();
      if (lane % 8 == 0 && row < rows) row_sums[row] = sum;
    }
  }
}

template <Format kFormat, class T>
__device__ __forceinline__ void sum_strip(const Factored& of, const void* data, const Strip& strip, T factor,
                                          double* row_sums, double* column_sums, double (&sums)[kQuads][kQuad]) {
  if (of.columns % kQuad == 0 && is_aligned(data, kWideBytes)) {
    sum_rows<kFormat, true>(of, data, strip, factor, row_sums, column_sums, sums);
  } else {
    sum_rows<kFormat, false>(of, data, strip, factor, row_sums, column_sums, sums);
  }
}

// Each block takes a unit, each warp a strip of it.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == sizeof(float) ? 2 : 1)
    factor_sums(StepJob job, const Factored* matrices, int32_t num_matrices) {
  __shared__ double strips[kStrips][kUnitColumns];
  if (skips_step(job)) return;
  const T factor = T(factor_of_gradients(job));
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t i = blockIdx.x;
  const Factored of = matrices[formats::last_from_in_warp(matrices, num_matrices, &Factored::first_unit, i)];
  const TypedArray grad = job.params[of.param].grad;
  const int64_t unit = i - of.first_unit;
  const Strip strip = strip_of(of, unit, warp);
  double* const row_sums = row_sums_of(of, unit);
  double* const column_sums = column_sums_of(of, unit);
  double columns[kQuads][kQuad] = {};
  switch (grad.format) {
    case Format::kFloat64:
      sum_strip<Format::kFloat64>(of, grad.data, strip, factor, row_sums, column_sums, columns);
      break;
    case Format::kBFloat16:
      sum_strip<Format::kBFloat16>(of, grad.data, strip, factor, row_sums, column_sums, columns);
      break;
    case Format::kFloat16:
      sum_strip<Format::kFloat16>(of, grad.data, strip, factor, row_sums, column_sums, columns);
      break;
    default:
      sum_strip<Format::kFloat32>(of, grad.data, strip, factor, row_sums, column_sums, columns);
  }
  if (is_low(of)) return;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) strips[warp][quad_position(q) + k] = columns[q][k];
  }
  __syncthreads();
  double own[kStrips];
#pragma unroll
  for (int s = 0; s < kStrips; ++s) own[s] = strips[s][threadIdx.x];
#pragma unroll
  for (int half = kStrips / 2; half > 0; half /= 2) {
#pragma unroll
    for (int s = 0; s < half; ++s) own[s] += own[s + half];
  }
  const int64_t matrix = strip_of(of, unit, 0).row_begin / of.rows;  // This warp's own strip may be empty.
  const int64_t column = strip.column_begin + threadIdx.x;
  if (column < strip.column_end) column_sums[matrix * of.columns + column] = own[0];
}

// Sums from first to last, with several loads outstanding.
__device__ double sum_of(const double* values, int64_t count, int64_t stride) {
  constexpr int kUnroll = 16;
  double sum = 0;
  for (int64_t base = 0; base < count; base += kUnroll) {
    double some[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) some[k] = base + k < count ? values[(base + k) * stride] : 0.0;
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) sum += some[k];
  }
  return sum;
}

template <class T>
__device__ void store_element(const TypedArray& state, int64_t i, T value) {
  switch (state.format) {
    case Format::kFloat64:
      static_cast<double*>(state.data)[i] = static_cast<double>(value);
      return;
    case Format::kBFloat16:
      static_cast<uint16_t*>(state.data)[i] = bfloat16_from_float(static_cast<float>(value));
      return;
    case Format::kFloat16:
      static_cast<uint16_t*>(state.data)[i] = float16_from_float(static_cast<float>(value));
      return;
    default:
      static_cast<float*>(state.data)[i] = static_cast<float>(value);
  }
}

// Updates the mean of one row or column in its state.
template <class T>
__device__ T take_in(const TypedArray& state, int64_t index, double sum, int64_t count, double fresh) {
  const T mean = new_mean<T>(load_plain_element<T>(state, index), sum, count, fresh);
  store_element(state, index, mean);
  return mean;
}

// The rows of a block of the update, or of a warp if its matrices are low, counted over all matrices.
struct RowRange {
  int64_t matrix_begin, matrix_end;  // rows of the matrix that contains them
  int64_t begin, end;
  int team, member;  // threads that share them, and this thread's index among them
};
__device__ __forceinline__ RowRange rows_of_block(const Factored& of, int64_t block) {
  const int thread = static_cast<int>(threadIdx.x);
  if (is_low(of)) {
    const int64_t matrix = block * kStrips + thread / kLanes;
    const int64_t begin = smaller(matrix, of.matrices) * of.rows, end = smaller(matrix + 1, of.matrices) * of.rows;
    return {begin, end, begin, end, kLanes, thread % kLanes};
  }
  const int64_t blocks = (of.rows + kBlockRows - 1) / kBlockRows, matrix = block / blocks;
  const int64_t matrix_begin = matrix * of.rows, matrix_end = matrix_begin + of.rows;
  const int64_t begin = matrix_begin + (block - matrix * blocks) * kBlockRows;
  return {matrix_begin, matrix_end, begin, smaller(begin + kBlockRows, matrix_end), kThreads, thread};
}

// Updates the states with the sums of rows and columns. A row's mean replaces its first sum; its factor is computed
// from it once the means of all rows exist.
template <class T>
__global__ void __launch_bounds__(kThreads) update_means(StepJob job, const Factored* matrices, int32_t num_matrices) {
  if (skips_step(job)) return;
  const int64_t i = blockIdx.x;
  const Factored of = matrices[formats::last_from_in_warp(matrices, num_matrices, &Factored::first_block, i)];
  const ParamJob& param = job.params[of.param];
  const double fresh = load_args<AdafactorArgs>(job.rules[param.rule]).fresh;
  const int64_t block = i - of.first_block, row_blocks = num_row_blocks(of);
  if (block < row_blocks) {
    const RowRange rows = rows_of_block(of, block);
    for (int64_t row = rows.begin + rows.member; row < rows.end; row += rows.team) {
      const double sum = sum_of(of.row_sums + row, num_column_units(of), of.matrices * of.rows);
      of.row_sums[row] = take_in<T>(param.state[1], row, sum, of.columns, fresh);
    }
    return;
  }
  const int64_t column = (block - row_blocks) * kThreads + threadIdx.x, columns = of.matrices * of.columns;
  if (column >= columns) return;
  const double sum = sum_of(of.column_sums + column, num_row_units(of), columns);
  static_cast<T*>(param.state[0].extra)[column] = factor_of(take_in<T>(param.state[2], column, sum, of.rows, fresh));
}

// Computes the rows' factors. Every block of a matrix sums the means of all of its rows, which are in the L2 cache.
template <class T>
__global__ void __launch_bounds__(kThreads) factor_rows(StepJob job, const Factored* matrices, int32_t num_matrices) {
  __shared__ double slots[kMeanSlots];
  if (skips_step(job)) return;
  const int64_t i = blockIdx.x;
  const Factored of = matrices[formats::last_from_in_warp(matrices, num_matrices, &Factored::first_block, i)];
  const ParamJob& param = job.params[of.param];
  const int64_t block = i - of.first_block;
  if (block >= num_row_blocks(of)) return;
  const RowRange rows = rows_of_block(of, block);
  const int64_t left = rows.matrix_end - rows.matrix_begin - rows.member;
  const int thread = static_cast<int>(threadIdx.x);
  slots[thread] = sum_of(of.row_sums + rows.matrix_begin + rows.member, (left + rows.team - 1) / rows.team, rows.team);
  __syncthreads();
  for (int width = rows.team / 2; width > 0; width /= 2) {
    if (rows.member < width) slots[thread] += slots[thread + width];
    __syncthreads();
  }
  const double eps1 = load_args<AdafactorArgs>(job.rules[param.rule]).eps1;
  const T scale = scale_of_rows<T>(slots[thread - rows.member], of.rows, eps1);
  for (int64_t row = rows.begin + rows.member; row < rows.end; row += rows.team) {
    static_cast<T*>(param.state[0].data)[row] = factor_of(static_cast<T>(of.row_sums[row])) * scale;
  }
}

}  // namespace

void factor_cuda(const StepJob& job, const Factored* matrices, int32_t num_matrices, int64_t num_units,
                 int64_t num_blocks, void* stream) {
  if (num_matrices == 0) return;
  launch_cuda("launching the sums of rows and columns", job.in_double ? factor_sums<double> : factor_sums<float>,
              num_units, kThreads, stream, job, matrices, num_matrices);
  launch_cuda("launching the means of rows and columns", job.in_double ? update_means<double> : update_means<float>,
              num_blocks, kThreads, stream, job, matrices, num_matrices);
  launch_cuda("launching the factors of rows", job.in_double ? factor_rows<double> : factor_rows<float>, num_blocks,
              kThreads, stream, job, matrices, num_matrices);
}

}  // namespace drivetrain::optim
