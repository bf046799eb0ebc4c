// Adafactor's loops over a block of a parameter's matrices: compiled once per instruction set (DRIVETRAIN_ISA names the
// namespace), includes no torch header.
#include <algorithm>
#include <limits>

#include "grad/square_sum_cpu.h"
#include "optim/adafactor_pass.h"
#include "optim/loop_cpu.h"

namespace drivetrain::optim::DRIVETRAIN_ISA {
namespace {

// visit(row, rows, column, columns): several rows at once where they are short and follow each other in memory.
template <class Visit>
void for_each_tile(const ParamJob& param, const Block& block, const Visit& visit) {
  const int64_t width = block.column_end - block.column_begin;
  const int64_t rows_at_once = width == param.columns ? std::max<int64_t>(1, kTile / width) : 1;
  for (int64_t row = block.row_begin; row < block.row_end; row += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, block.row_end - row);
    for (int64_t column = block.column_begin; column < block.column_end; column += kTile) {
      visit(row, rows, column, std::min<int64_t>(kTile, block.column_end - column));
    }
  }
}

// Adds the squares to the columns' sums; returns the row's.
template <class T>
double add_squares(T factor, const T* __restrict grad, double* __restrict columns, int64_t count) {
  constexpr int kLanes = 16;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = factor * grad[i + lane];
      lanes[lane] += value * value;
      columns[i + lane] += value * value;
    }
  }
  for (int lane = 0; i < count; ++i, ++lane) {
    const double value = factor * grad[i];
    lanes[lane] += value * value;
    columns[i] += value * value;
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <class T>
double sums(const StepJob& job, const ParamJob& param, const Block& block, FactorSums to) {
  alignas(64) T scratch[2][kTile];
  grad::DRIVETRAIN_ISA::SquareSum params;
  for_each_tile(param, block, [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const int64_t index = row * param.columns + column;
    params.add(load_tile<T>(param.param, index, rows * columns, scratch[0]), rows * columns);
    const T* grad = load_tile<T>(param.grad, index, rows * columns, scratch[1]);
    for (int64_t r = 0; r < rows; ++r) {
      double* column_sums = to.columns + (row + r) / param.rows * param.columns + column;
      to.rows[row + r] += add_squares(T(job.treatment.factor), grad + r * columns, column_sums, columns);
    }
  });
  return params.total();
}

// A state's new values, which are means, into it and into `factors`; returns the least. sums: num_sums arrays of
// `stride`, the first at its own first element.
template <class T>
double update_state(const Stream& state, int64_t first, int64_t count, const double* sums, int64_t num_sums,
                    int64_t stride, double summands, double fresh, T* factors) {
  double least = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int64_t k = 0; k < num_sums; ++k) sum += sums[k * stride + i];
    const double before = load_one<T>(state, first + i);
    factors[i] = static_cast<T>(before + fresh * (sum / summands - before));
    store_one(state, first + i, factors[i]);
    if (factors[i] < least) least = factors[i];
  }
  return least;
}

template <class T>
Least update(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end, FactorSums sums,
             int64_t num_row_sums, int64_t num_column_sums, Factors factors) {
  const AdafactorArgs args = job.rules[param.rule].as<AdafactorArgs>();
  const int64_t matrices = param.numel / (param.rows * param.columns);
  Least least = {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i * param.rows, column = i * param.columns;
    T* rows = static_cast<T*>(factors.rows) + row;
    double least_row = update_state(param.state[0], row, param.rows, sums.rows + row, num_row_sums,
                                    matrices * param.rows, double(param.columns), args.fresh, rows);
    double mean = 0;
    for (int64_t r = 0; r < param.rows; ++r) mean += rows[r];
    mean = maximum(mean / double(param.rows), args.eps1);
    for (int64_t r = 0; r < param.rows; ++r) rows[r] = static_cast<T>(rows[r] / mean);
    least_row /= mean;
    const double least_column = update_state(param.state[1], column, param.columns, sums.columns + column,
                                             num_column_sums, matrices * param.columns, double(param.rows), args.fresh,
                                             static_cast<T*>(factors.columns) + column);
    least = {std::min(least.row, least_row), std::min(least.column, least_column)};
  }
  return least;
}

template <class T, bool kAreRoots>
void directions(T factor, const T* __restrict grad, T row, const T* __restrict columns, T floor,
                T* __restrict direction, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const T product = row * columns[i], value = factor * grad[i];
    direction[i] = kAreRoots ? value * product : value / square_root(maximum(product, floor));
  }
}

// Of a tile, in `direction`.
template <class T>
void directions_of(const StepJob& job, const ParamJob& param, const Factors& factors, const T* grad, T* direction,
                   int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const T factor = T(job.treatment.factor);
  for (int64_t r = 0; r < rows; ++r) {
    const T of_row = static_cast<const T*>(factors.rows)[row + r];
    const T* of_columns = static_cast<const T*>(factors.columns) + (row + r) / param.rows * param.columns + column;
    const auto run = factors.are_roots ? directions<T, true> : directions<T, false>;
    run(factor, grad + r * columns, of_row, of_columns, T(factors.floor), direction + r * columns, columns);
  }
}

template <class T>
double direction(const StepJob& job, const ParamJob& param, const Block& block, const Factors& factors) {
  alignas(64) T scratch[2][kTile];
  grad::DRIVETRAIN_ISA::SquareSum sum;
  for_each_tile(param, block, [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const T* grad = load_tile<T>(param.grad, row * param.columns + column, rows * columns, scratch[0]);
    directions_of(job, param, factors, grad, scratch[1], row, rows, column, columns);
    sum.add(scratch[1], rows * columns);
  });
  return sum.total();
}

template <class T>
void step_along(T decay, T step_size, const T* __restrict direction, T* __restrict param, int64_t count) {
  for (int64_t i = 0; i < count; ++i) param[i] = param[i] * decay - step_size * direction[i];
}

template <class T>
void step(const StepJob& job, const ParamJob& param, const Block& block, const Factors& factors) {
  const AdafactorArgs args = job.rules[param.rule].as<AdafactorArgs>();
  alignas(64) T scratch[3][kTile];
  for_each_tile(param, block, [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const int64_t index = row * param.columns + column, count = rows * columns;
    T* values = load_tile<T>(param.param, index, count, scratch[0]);
    T* grad = load_tile<T>(param.grad, index, count, scratch[1]);
    directions_of(job, param, factors, grad, scratch[2], row, rows, column, columns);
    step_along(T(args.decay), T(args.step_size * args.sign), scratch[2], values, count);
    leave_grad(job.treatment, param.grad, index, count, grad);
    store_tile(param.param, index, count, values, param.key);
  });
}

}  // namespace

double adafactor_sums_cpu(const StepJob& job, const ParamJob& param, const Block& block, FactorSums to) {
  return job.in_double ? sums<double>(job, param, block, to) : sums<float>(job, param, block, to);
}

Least adafactor_update_cpu(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end, FactorSums sums,
                           int64_t num_row_sums, int64_t num_column_sums, Factors factors) {
  const auto run = job.in_double ? update<double> : update<float>;
  return run(job, param, begin, end, sums, num_row_sums, num_column_sums, factors);
}

void adafactor_roots_cpu(const StepJob& job, void* factors, int64_t count) {
  const auto run = [count](auto* values) {
    for (int64_t i = 0; i < count; ++i) values[i] = 1 / square_root(values[i]);
  };
  if (job.in_double) return run(static_cast<double*>(factors));
  run(static_cast<float*>(factors));
}

double adafactor_direction_cpu(const StepJob& job, const ParamJob& param, const Block& block, const Factors& factors) {
  return job.in_double ? direction<double>(job, param, block, factors) : direction<float>(job, param, block, factors);
}

void adafactor_step_cpu(const StepJob& job, const ParamJob& param, const Block& block, const Factors& factors) {
  return job.in_double ? step<double>(job, param, block, factors) : step<float>(job, param, block, factors);
}

}  // namespace drivetrain::optim::DRIVETRAIN_ISA
