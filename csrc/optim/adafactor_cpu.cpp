// Runs Adafactor's passes over the matrices of a parameter: compiled once per instruction set (DRIVETRAIN_ISA names the
// namespace), includes no torch header.
#include <algorithm>

#include "formats/summation.h"
#include "formats/tile_cpu.h"
#include "optim/adafactor_pass.h"

namespace drivetrain::optim::DRIVETRAIN_ISA {
namespace {

// Sums as a tree: the second half is added to the first. Values beyond `count` are 0 and need not exist.
double tree_sum(double* values, int64_t count) {
  int64_t width = 1;
  while (width < count) width *= 2;
  while ((width /= 2) > 0) {
    for (int64_t i = 0; i + width < count; ++i) values[i] += values[i + width];
    count = width;
  }
  return values[0];
}

// Adds the squares to the columns' sums, and returns the row's sum in the order of a chunk (formats/summation.h).
template <class T>
double add_squares(T factor, const T* __restrict grad, double* __restrict columns, int64_t count) {
  using formats::kLanes, formats::kSlots;
  static_assert(kUnitColumns == 2 * kSlots && kSlots == 4 * kLanes);
  if (count < kUnitColumns) {
    double slots[kSlots];
    for (int64_t i = 0; i < count; ++i) {
      const double value = factor * grad[i], square = value * value;
      columns[i] += square;
      if (i < kSlots) {
        slots[i] = square;
      } else {
        slots[i - kSlots] += square;
      }
    }
    return tree_sum(slots, std::min<int64_t>(count, kSlots));
  }
  // Keeps the tree's first steps in registers.
  double lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    double squares[kUnitColumns / kLanes];
    for (int k = 0; k < kUnitColumns / kLanes; ++k) {
      const double value = factor * grad[lane + k * kLanes];
      squares[k] = value * value;
      columns[lane + k * kLanes] += squares[k];
    }
    lanes[lane] = ((squares[0] + squares[4]) + (squares[2] + squares[6])) +
                  ((squares[1] + squares[5]) + (squares[3] + squares[7]));
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// Calls visit(row, values) for each row of the gradient; several short rows are loaded at once.
template <class T, class Visit>
void for_each_row(const ParamJob& param, const Strip& strip, const Visit& visit) {
  alignas(64) T scratch[kTile];
  static_assert(kUnitColumns <= kTile);
  const int64_t width = strip.column_end - strip.column_begin;
  const int64_t rows_at_once = width == param.columns ? std::max<int64_t>(1, kTile / width) : 1;
  for (int64_t row = strip.row_begin; row < strip.row_end; row += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, strip.row_end - row);
    const T* grad = load_tile<T>(param.grad, row * param.columns + strip.column_begin, rows * width, scratch);
    for (int64_t r = 0; r < rows; ++r) visit(row + r, grad + r * width);
  }
}

template <class T>
void sums(const StepJob& job, const Factored& of, int64_t unit) {
  const ParamJob& param = job.params[of.param];
  const T factor = T(job.grad_scaling.factor);
  double* const row_sums = row_sums_of(of, unit);
  double* const column_sums = column_sums_of(of, unit);
  double strips[kStrips][kUnitColumns];
  for (int s = 0; s < kStrips; ++s) {
    const Strip strip = strip_of(of, unit, s);
    const int64_t width = strip.column_end - strip.column_begin;
    double* columns = strips[s];
    std::fill(columns, columns + width, 0.0);
    for_each_row<T>(param, strip, [&](int64_t row, const T* grad) {
      if (is_low(of) && row % of.rows == 0) {  // a new matrix begins
        columns = column_sums + row / of.rows * of.columns + strip.column_begin;
        std::fill(columns, columns + width, 0.0);
      }
      row_sums[row] = add_squares(factor, grad, columns, width);
    });
  }
  if (is_low(of)) return;
  const Strip first = strip_of(of, unit, 0);
  const int64_t width = first.column_end - first.column_begin;
  for (int half = kStrips / 2; half > 0; half /= 2) {
    for (int s = 0; s < half; ++s) {
      for (int64_t i = 0; i < width; ++i) strips[s][i] += strips[s + half][i];
    }
  }
  std::copy(strips[0], strips[0] + width, column_sums + first.row_begin / of.rows * of.columns + first.column_begin);
}

// Updates the mean of one row or column in its state. `sums` points to num_sums values, `stride` apart, which cover
// about count / num_sums squares each.
template <class T>
T take_in(const TypedArray& state, int64_t index, const double* sums, int64_t num_sums, int64_t stride, int64_t count,
          double fresh) {
  double sum = 0;
  for (int64_t k = 0; k < num_sums; ++k) sum += sums[k * stride];
  const T mean = new_mean<T>(load_one<T>(state, index), sum, count, fresh);
  store_one(state, index, mean);
  return mean;
}

template <class T>
void update(const StepJob& job, const Factored& of, int64_t begin, int64_t end) {
  const ParamJob& param = job.params[of.param];
  const AdafactorArgs args = job.rules[param.rule].as<AdafactorArgs>();
  T* const row_factors = static_cast<T*>(param.state[0].data);
  T* const column_factors = static_cast<T*>(param.state[0].extra);
  for (int64_t matrix = begin; matrix < end; ++matrix) {
    double slots[kMeanSlots];
    const int64_t first_row = matrix * of.rows;
    for (int64_t r = 0; r < of.rows; ++r) {
      const int64_t row = first_row + r;
      const T mean = take_in<T>(param.state[1], row, of.row_sums + row, num_column_units(of), of.matrices * of.rows,
                                of.columns, args.fresh);
      row_factors[row] = factor_of(mean);
      if (r < kMeanSlots) {
        slots[r] = mean;
      } else {
        slots[r % kMeanSlots] += mean;
      }
    }
    const double sum = tree_sum(slots, std::min<int64_t>(of.rows, kMeanSlots));
    const T scale = scale_of_rows<T>(sum, of.rows, args.eps1);
    for (int64_t row = first_row; row < first_row + of.rows; ++row) row_factors[row] *= scale;
    for (int64_t column = matrix * of.columns; column < (matrix + 1) * of.columns; ++column) {
      column_factors[column] = factor_of(take_in<T>(param.state[2], column, of.column_sums + column, num_row_units(of),
                                                    of.matrices * of.columns, of.rows, args.fresh));
    }
  }
}

}  // namespace

void adafactor_sums_cpu(const StepJob& job, const Factored& of, int64_t unit) {
  return job.in_double ? sums<double>(job, of, unit) : sums<float>(job, of, unit);
}

void adafactor_update_cpu(const StepJob& job, const Factored& of, int64_t begin, int64_t end) {
  return job.in_double ? update<double>(job, of, begin, end) : update<float>(job, of, begin, end);
}

}  // namespace drivetrain::optim::DRIVETRAIN_ISA
