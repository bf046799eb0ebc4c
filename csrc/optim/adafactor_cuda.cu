// Adafactor's passes over the matrices of all parameters on CUDA; the others are those of layer_cuda.cu and the step's.
// See adafactor_pass.h. Includes no torch header.
#include <algorithm>

#include "base/launch_cuda.h"
#include "grad/lanes_cuda.cuh"
#include "optim/adafactor_pass.h"
#include "optim/cuda_step.h"
#include "optim/loop_cuda.cuh"

namespace drivetrain::optim {
namespace {

using grad::kLanes;

constexpr int64_t kMaxBlocks = 1 << 14;  // fills any GPU; more units loop
static_assert(kThreads == kStrips * kLanes && kThreads == kUnitColumns && kThreads == kSlots && kStripRows <= kLanes);

// A block takes a unit, a warp a strip of it: row by row, every thread with columns of its own.
template <class T>
__global__ void __launch_bounds__(kThreads)
    factor_sums(StepJob job, const Factored* matrices, int32_t num_matrices, int64_t num_units) {
  constexpr int kColumns = kUnitColumns / kLanes;  // of a thread
  __shared__ double strips[kStrips][kUnitColumns];
  const GradTreatment treatment = treatment_of_job(job);
  if (treatment.skips) return;
  const T factor = T(treatment.factor);
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = grad::lane_of_thread();
  for (int64_t i = blockIdx.x; i < num_units; i += gridDim.x) {
    const Factored of = matrices[last_from(matrices, num_matrices, &Factored::first_unit, i)];
    const Stream grad = job.params[of.param].grad;
    const int64_t unit = i - of.first_unit;
    const Strip strip = strip_of(of, unit, warp);
    double* const row_sums = row_sums_of(of, unit);
    double* const column_sums = column_sums_of(of, unit);
    double columns[kColumns] = {};
    int64_t matrix = strip.row_begin / of.rows, matrix_end = (matrix + 1) * of.rows;
    for (int64_t row = strip.row_begin; row < strip.row_end; ++row) {
      const int64_t first = row * of.columns + strip.column_begin + lane, end = row * of.columns + strip.column_end;
      T values[kColumns] = {};
      load_plain_elements<kLanes>(grad, first, end, values);
      double sum = 0;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        const double value = first + k * kLanes < end ? factor * values[k] : T(0);
        sum += value * value;
        columns[k] += value * value;
      }
      sum = grad::sum_of_lanes(sum);
      if (lane == 0) row_sums[row] = sum;
      if (!is_low(of) || row + 1 < matrix_end) continue;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {  // a whole matrix
        const int64_t column = strip.column_begin + lane + k * kLanes;
        if (column < strip.column_end) column_sums[matrix * of.columns + column] = columns[k];
        columns[k] = 0;
      }
      ++matrix;
      matrix_end += of.rows;
    }
    if (is_low(of)) continue;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) strips[warp][lane + k * kLanes] = columns[k];
    __syncthreads();
    double own[kStrips];
#pragma unroll
    for (int s = 0; s < kStrips; ++s) own[s] = strips[s][threadIdx.x];
#pragma unroll
    for (int half = kStrips / 2; half > 0; half /= 2) {
#pragma unroll
      for (int s = 0; s < half; ++s) own[s] += own[s + half];
    }
    matrix = strip_of(of, unit, 0).row_begin / of.rows;  // this warp's own strip may be empty
    const int64_t column = strip.column_begin + threadIdx.x;
    if (column < strip.column_end) column_sums[matrix * of.columns + column] = own[0];
    __syncthreads();
  }
}

// From the first to the last, with several loads under way at once.
__device__ double sum_of(const double* values, int64_t count, int64_t stride) {
  constexpr int kUnroll = 8;
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

// One row's or column's new mean, into its state.
template <class T>
__device__ T take_in(const Stream& state, int64_t index, double sum, int64_t count, double fresh) {
  T value[1];
  load_plain_elements<1>(state, index, index + 1, value);
  value[0] = new_mean<T>(value[0], sum, count, fresh);
  store_plain_elements<1>(state, index, index + 1, value);
  return value[0];
}

// A block takes a matrix' rows, or of low matrices a warp does.
template <class T>
__device__ void update_rows(const ParamJob& param, const Factored& of, const AdafactorArgs& args, int64_t block) {
  __shared__ double slots[kSlots];
  T* const factors = static_cast<T*>(param.state[0].data);
  const int thread = static_cast<int>(threadIdx.x), team = is_low(of) ? kLanes : kThreads, member = thread % team;
  const int64_t matrix = block * (kThreads / team) + thread / team;
  const int64_t first = smaller(matrix, of.matrices) * of.rows, end = smaller(matrix + 1, of.matrices) * of.rows;
  double sum = 0;
  for (int64_t row = first + member; row < end; row += team) {
    const double of_row = sum_of(of.row_sums + row, num_column_units(of), of.matrices * of.rows);
    const T mean = take_in<T>(param.state[1], row, of_row, of.columns, args.fresh);
    factors[row] = factor_of(mean);
    sum += mean;
  }
  slots[thread] = sum;
  __syncthreads();
  for (int width = team / 2; width > 0; width /= 2) {
    if (member < width) slots[thread] += slots[thread + width];
    __syncthreads();
  }
  const T scale = scale_of_rows<T>(slots[thread - member], of.rows, args.eps1);
  for (int64_t row = first + member; row < end; row += team) factors[row] *= scale;
  __syncthreads();  // before the slots are filled again
}

template <class T>
__device__ void update_columns(const ParamJob& param, const Factored& of, const AdafactorArgs& args, int64_t block) {
  const int64_t column = block * kThreads + threadIdx.x, columns = of.matrices * of.columns;
  if (column >= columns) return;
  const double sum = sum_of(of.column_sums + column, num_row_units(of), columns);
  static_cast<T*>(param.state[0].extra)[column] =
      factor_of(take_in<T>(param.state[2], column, sum, of.rows, args.fresh));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    update_factors(StepJob job, const Factored* matrices, int32_t num_matrices, int64_t num_blocks) {
  if (treatment_of_job(job).skips) return;
  for (int64_t i = blockIdx.x; i < num_blocks; i += gridDim.x) {
    const Factored of = matrices[last_from(matrices, num_matrices, &Factored::first_block, i)];
    const ParamJob& param = job.params[of.param];
    const AdafactorArgs args = job.rules[param.rule].as<AdafactorArgs>();
    const int64_t block = i - of.first_block, row_blocks = num_row_blocks(of);
    if (block < row_blocks) {
      update_rows<T>(param, of, args, block);
    } else {
      update_columns<T>(param, of, args, block - row_blocks);
    }
  }
}

}  // namespace

void factor_cuda(const StepJob& job, const Factored* matrices, int32_t num_matrices, int64_t num_units,
                 int64_t num_blocks, void* stream) {
  if (num_matrices == 0) return;
  const auto sums = job.in_double ? factor_sums<double> : factor_sums<float>;
  launch_cuda("launching the sums of rows and columns", sums, std::min(num_units, kMaxBlocks), kThreads, stream, job,
              matrices, num_matrices, num_units);
  const auto update = job.in_double ? update_factors<double> : update_factors<float>;
  launch_cuda("launching the update of factors", update, std::min(num_blocks, kMaxBlocks), kThreads, stream, job,
              matrices, num_matrices, num_blocks);
}

}  // namespace drivetrain::optim
