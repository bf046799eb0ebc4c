// Which matrices Adafactor factors, and where their sums and factors lie; see adafactor.h. Needs no torch header.
#include "optim/adafactor.h"

namespace drivetrain::optim {
namespace {

int64_t num_row_sums(const Factored& of) { return num_column_units(of) * of.matrices * of.rows; }
int64_t num_column_sums(const Factored& of) { return num_row_units(of) * of.matrices * of.columns; }

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
        num_row_sums(of) + num_column_sums(of) + of.matrices * (of.rows + of.columns);  // factors may be double, too
    factoring.matrices.push_back(of);
  }
  return factoring;
}

void place_factors(Factoring& factoring, ParamJob* params, double* memory) {
  for (Factored& of : factoring.matrices) {
    of.row_sums = memory;
    of.column_sums = of.row_sums + num_row_sums(of);
    double* const row_factors = of.column_sums + num_column_sums(of);
    double* const column_factors = row_factors + of.matrices * of.rows;
    params[of.param].state[0] = {row_factors, Format::kFactored, column_factors};
    memory = column_factors + of.matrices * of.columns;
  }
}

}  // namespace drivetrain::optim
