// Plans which matrices Adafactor factors, and places their sums and factors; see adafactor.h. Needs no torch header.
#include "optim/adafactor.h"

namespace drivetrain::optim {
namespace {

// Sizes are in doubles and even, so that all parts begin at multiples of 16 bytes.
int64_t even(int64_t count) { return count + count % 2; }
int64_t size_of_row_sums(const Factored& of) { return even(num_column_units(of) * of.matrices * of.rows); }
int64_t size_of_column_sums(const Factored& of) { return even(num_row_units(of) * of.matrices * of.columns); }
// Factors may be double.
int64_t size_of_row_factors(const Factored& of) { return even(of.matrices * of.rows); }
int64_t size_of_column_factors(const Factored& of) { return even(of.matrices * of.columns); }

}  // namespace

Factoring factoring_of(const ParamJob* params, int32_t num_params) {
  Factoring factoring;
  for (int32_t i = 0; i < num_params; ++i) {
    const ParamJob& param = params[i];
    if (param.rows == 0) continue;
    Factored of = {};
    of.param = i;
    of.matrices = param.numel / (param.rows * param.columns);
    of.rows = param.rows;
    of.columns = param.columns;
    of.first_unit = factoring.num_units;
    of.first_block = factoring.num_blocks;
    factoring.num_units += num_units(of);
    factoring.num_blocks += num_update_blocks(of);
    factoring.num_doubles +=
        size_of_row_sums(of) + size_of_column_sums(of) + size_of_row_factors(of) + size_of_column_factors(of);
    factoring.matrices.push_back(of);
  }
  return factoring;
}

void place_factors(Factoring& factoring, ParamJob* params, double* memory) {
  for (Factored& of : factoring.matrices) {
    of.row_sums = memory;
    of.column_sums = of.row_sums + size_of_row_sums(of);
    double* const row_factors = of.column_sums + size_of_column_sums(of);
    double* const column_factors = row_factors + size_of_row_factors(of);
    params[of.param].state[0] = {row_factors, Format::kFactored, column_factors};
    memory = column_factors + size_of_column_factors(of);
  }
}

}  // namespace drivetrain::optim
