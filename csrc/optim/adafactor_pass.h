// Describes Adafactor's passes over matrices as plain data: their division, the order of sums, and the kernels'
// arguments. Needs no torch header.
//
// A matrix is divided into units of kUnitRows * kUnitColumns elements, and a unit into strips of kStripRows rows. A
// row's squares are summed within a unit as a chunk's squares are (formats/summation.h). A column's squares are summed
// within a strip from top to bottom. Strips are summed as a tree, by adding the second half to the first, and units
// from first to last. For the mean over a matrix's rows, row i is added to slot i % kMeanSlots, and the slots as a
// tree. So the order depends on shapes alone.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"
#include "optim/step.h"

namespace drivetrain::optim {

constexpr int kStrips = 8;  // strips of a unit, and warps of a block on CUDA
constexpr int kStripRows = 32;
constexpr int kUnitRows = kStrips * kStripRows;
constexpr int kUnitColumns = 256;
constexpr int kMeanSlots = 256;  // also the threads of a block on CUDA

// A contiguous parameter of `matrices` matrices, and the sums of squares of its gradient. Its first state, of format
// kFactored, has the values per row and column whose products scale its step.
struct Factored {
  int64_t param;  // index into StepJob::params
  int64_t matrices, rows, columns;
  double* row_sums;     // per unit of columns: [matrices, rows]
  double* column_sums;  // per unit of rows: [matrices, columns]
  // CUDA: indices of its first unit and of its first block of the update, counted over all parameters.
  int64_t first_unit, first_block;
};

// A part of a unit; rows are counted over all matrices.
struct Strip {
  int64_t row_begin, row_end;
  int64_t column_begin, column_end;
};

DT_BEGIN_ISA

DT_HOST_DEVICE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Returns whether the matrices are low: a strip takes several whole ones.
DT_HOST_DEVICE bool is_low(const Factored& of) { return of.rows <= kStripRows; }

// Count the units of one matrix.
DT_HOST_DEVICE int64_t num_row_units(const Factored& of) { return (of.rows + kUnitRows - 1) / kUnitRows; }
DT_HOST_DEVICE int64_t num_column_units(const Factored& of) { return (of.columns + kUnitColumns - 1) / kUnitColumns; }

DT_HOST_DEVICE int64_t num_units(const Factored& of) {
  const int64_t in_unit = kStrips * (kStripRows / of.rows);
  const int64_t high = is_low(of) ? (of.matrices + in_unit - 1) / in_unit : of.matrices * num_row_units(of);
  return high * num_column_units(of);
}

// On CUDA a block of the update takes kBlockRows rows of a matrix, or kMeanSlots columns. With low matrices, it takes
// all rows of one matrix per warp.
constexpr int kBlockRows = 1024;
DT_HOST_DEVICE int64_t num_row_blocks(const Factored& of) {
  return is_low(of) ? (of.matrices + kStrips - 1) / kStrips : of.matrices * ((of.rows + kBlockRows - 1) / kBlockRows);
}
DT_HOST_DEVICE int64_t num_update_blocks(const Factored& of) {
  return num_row_blocks(of) + (of.matrices * of.columns + kMeanSlots - 1) / kMeanSlots;
}

// Returns a strip, which may be empty.
DT_HOST_DEVICE Strip strip_of(const Factored& of, int64_t unit, int strip) {
  const int64_t across = num_column_units(of), down = unit / across, column = (unit - down * across) * kUnitColumns;
  Strip result = {0, 0, column, smaller(column + kUnitColumns, of.columns)};
  if (is_low(of)) {
    const int64_t in_strip = kStripRows / of.rows, first = (down * kStrips + strip) * in_strip;
    result.row_begin = smaller(first, of.matrices) * of.rows;
    result.row_end = smaller(first + in_strip, of.matrices) * of.rows;
  } else {
    const int64_t units = num_row_units(of), matrix = down / units;
    const int64_t row = (down - matrix * units) * kUnitRows + strip * kStripRows;
    result.row_begin = matrix * of.rows + smaller(row, of.rows);
    result.row_end = matrix * of.rows + smaller(row + kStripRows, of.rows);
  }
  return result;
}

// Return the addresses of the sums of a unit's rows, by row, and of its columns, by matrix and column.
DT_HOST_DEVICE double* row_sums_of(const Factored& of, int64_t unit) {
  return of.row_sums + unit % num_column_units(of) * of.matrices * of.rows;
}
DT_HOST_DEVICE double* column_sums_of(const Factored& of, int64_t unit) {
  return of.column_sums + unit / num_column_units(of) % num_row_units(of) * of.matrices * of.columns;
}

// Returns a state's new value; `sum` is over `count` squares.
template <class T>
DT_HOST_DEVICE T new_mean(double before, double sum, int64_t count, double fresh) {
  return static_cast<T>(interpolated(before, sum / static_cast<double>(count), fresh));
}

// The factor of a gradient is 1 / sqrt(row * column / mean of rows). It is the product of a row's and a column's root;
// the row's includes the root of the mean. The step limits the product.
template <class T>
DT_HOST_DEVICE T factor_of(T mean) {
  return T(1) / square_root(mean);
}
template <class T>
DT_HOST_DEVICE T scale_of_rows(double sum_of_means, int64_t rows, double eps1) {
  return static_cast<T>(sqrt(maximum(sum_of_means / static_cast<double>(rows), eps1)));
}

DT_END_ISA

// adafactor_sums_cpu sums one unit. adafactor_update_cpu updates the states of the matrices [begin, end): the
// parameter's second state for rows, and the third for columns. It writes the factors to the first state. One copy per
// instruction set.
DT_PER_ISA(void adafactor_sums_cpu(const StepJob& job, const Factored& of, int64_t unit))
DT_PER_ISA(void adafactor_update_cpu(const StepJob& job, const Factored& of, int64_t begin, int64_t end))

}  // namespace drivetrain::optim
