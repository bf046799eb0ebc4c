// Adafactor's passes over the matrices of one parameter, as plain data: what adafactor.cpp cuts up and its kernels get.
#pragma once

#include <cstdint>

#include "optim/step.h"

namespace drivetrain::optim {

// A part of a parameter of shape [.., rows, columns], which lies contiguously. Rows are counted through all its
// matrices: row r belongs to matrix r / rows.
struct Block {
  int64_t row_begin, row_end;
  int64_t column_begin, column_end;
};

// Of squares of gradients, in double; a block adds to its own.
struct FactorSums {
  double* rows;     // one per row
  double* columns;  // one per matrix and column
};

// What gradients are multiplied by, in the type that is computed in: 1 / sqrt(max(row * column, floor)), or if no
// product is below the floor, with both roots taken beforehand, row * column.
struct Factors {
  void* rows;
  void* columns;
  double floor;
  bool are_roots;
};

struct Least {
  double row, column;
};

// One copy per instruction set. sums: adds to both, and returns the sum of squares of the parameter's elements.
// update: takes new sums (num_row_sums arrays for rows, one after the other, and as many as num_column_sums for
// columns) into the states of the matrices [begin, end), and writes their factors, not roots; returns the least.
// roots: of count factors. direction: its sum of squares. step: the parameter's, whose args have been adapted.
#define DT_ADAFACTOR_PASSES                                                                                          \
  double adafactor_sums_cpu(const StepJob& job, const ParamJob& param, const Block& block, FactorSums sums);         \
  Least adafactor_update_cpu(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end, FactorSums sums, \
                             int64_t num_row_sums, int64_t num_column_sums, Factors factors);                        \
  void adafactor_roots_cpu(const StepJob& job, void* factors, int64_t count);                                        \
  double adafactor_direction_cpu(const StepJob& job, const ParamJob& param, const Block& block,                      \
                                 const Factors& factors);                                                            \
  void adafactor_step_cpu(const StepJob& job, const ParamJob& param, const Block& block, const Factors& factors);
namespace baseline {
DT_ADAFACTOR_PASSES
}
namespace avx2 {
DT_ADAFACTOR_PASSES
}
namespace avx512 {
DT_ADAFACTOR_PASSES
}
#undef DT_ADAFACTOR_PASSES

}  // namespace drivetrain::optim
