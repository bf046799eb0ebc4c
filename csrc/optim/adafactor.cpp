// Adafactor's passes, one parameter after the other; see adafactor.h.
#include "optim/adafactor.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "base/cpu_isa.h"
#include "optim/adafactor_pass.h"

namespace drivetrain::optim {
namespace {

// Elements of a block: sums depend on it, and on nothing else. Large enough that adding up its sums costs little.
constexpr int64_t kBlockElements = 1 << 15;
constexpr int64_t kBlockColumns = 1 << 12;

// Calls work(i) for 0 .. count on all threads.
template <class Work>
void in_parallel(int64_t count, const Work& work) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i);
  });
}

// How one parameter is cut up: whole matrices together if they are small, else each one both ways.
struct Cut {
  explicit Cut(const ParamJob& param) : matrices(param.numel / (param.rows * param.columns)) {
    const int64_t of_matrix = param.rows * param.columns;
    if (of_matrix <= kBlockElements) {
      const int64_t at_once = kBlockElements / of_matrix;
      for (int64_t i = 0; i < matrices; i += at_once) {
        blocks.push_back({i * param.rows, std::min(i + at_once, matrices) * param.rows, 0, param.columns});
      }
      return;
    }
    const int64_t width = std::min(param.columns, kBlockColumns), height = std::max<int64_t>(1, kBlockElements / width);
    num_row_blocks = (param.rows + height - 1) / height;
    num_column_blocks = (param.columns + width - 1) / width;
    for (int64_t i = 0; i < matrices; ++i) {
      for (int64_t row = 0; row < param.rows; row += height) {
        for (int64_t column = 0; column < param.columns; column += width) {
          blocks.push_back({i * param.rows + row, i * param.rows + std::min(row + height, param.rows), column,
                            std::min(column + width, param.columns)});
        }
      }
    }
  }

  // Which sums a block adds to, so that no two blocks share any.
  int64_t row_block(const ParamJob& param, const Block& block) const {
    if (num_row_blocks == 1) return 0;
    const int64_t height = (blocks[0].row_end - blocks[0].row_begin);
    return block.row_begin % param.rows / height;
  }
  int64_t column_block(const Block& block) const {
    return num_column_blocks == 1 ? 0 : block.column_begin / kBlockColumns;
  }

  int64_t matrices, num_row_blocks = 1, num_column_blocks = 1;
  std::vector<Block> blocks;
};

double total(const std::vector<double>& sums) {
  double sum = 0;
  for (double part : sums) sum += part;
  return sum;
}

void step_matrices(StepJob job, ParamJob param, Adapt adapt) {
  const Cut cut(param);
  const auto num_blocks = static_cast<int64_t>(cut.blocks.size());
  const int64_t rows = cut.matrices * param.rows, columns = cut.matrices * param.columns;
  RuleArgs args = job.rules[param.rule];
  job.rules = &args;
  job.num_rules = 1;
  param.rule = 0;

  std::vector<double> row_sums(cut.num_column_blocks * rows), column_sums(cut.num_row_blocks * columns);
  std::vector<double> param_sums(num_blocks), direction_sums(num_blocks);
  const auto sums = for_chosen_isa(baseline::adafactor_sums_cpu, avx2::adafactor_sums_cpu, avx512::adafactor_sums_cpu);
  in_parallel(num_blocks, [&](int64_t i) {
    const Block& block = cut.blocks[i];
    param_sums[i] = sums(
        job, param, block,
        {row_sums.data() + cut.column_block(block) * rows, column_sums.data() + cut.row_block(param, block) * columns});
  });

  std::vector<double> row_factors(rows), column_factors(columns);  // as large as either type needs
  const double eps1 = args.as<AdafactorArgs>().eps1;
  Factors factors = {row_factors.data(), column_factors.data(), eps1 * eps1, false};
  const auto update =
      for_chosen_isa(baseline::adafactor_update_cpu, avx2::adafactor_update_cpu, avx512::adafactor_update_cpu);
  const int64_t at_once = std::max<int64_t>(1, kBlockElements / (param.rows + param.columns));
  std::vector<Least> least((cut.matrices + at_once - 1) / at_once);
  in_parallel(static_cast<int64_t>(least.size()), [&](int64_t i) {
    least[i] = update(job, param, i * at_once, std::min((i + 1) * at_once, cut.matrices),
                      {row_sums.data(), column_sums.data()}, cut.num_column_blocks, cut.num_row_blocks, factors);
  });
  factors.are_roots = std::all_of(least.begin(), least.end(),
                                  [&](const Least& each) { return each.row * each.column >= factors.floor; });
  if (factors.are_roots) {
    const auto roots =
        for_chosen_isa(baseline::adafactor_roots_cpu, avx2::adafactor_roots_cpu, avx512::adafactor_roots_cpu);
    roots(job, factors.rows, rows);
    roots(job, factors.columns, columns);
  }

  const auto direction =
      for_chosen_isa(baseline::adafactor_direction_cpu, avx2::adafactor_direction_cpu, avx512::adafactor_direction_cpu);
  in_parallel(num_blocks, [&](int64_t i) { direction_sums[i] = direction(job, param, cut.blocks[i], factors); });
  adapt(args, {total(param_sums), total(direction_sums)}, param.numel);

  const auto step = for_chosen_isa(baseline::adafactor_step_cpu, avx2::adafactor_step_cpu, avx512::adafactor_step_cpu);
  in_parallel(num_blocks, [&](int64_t i) { step(job, param, cut.blocks[i], factors); });
}

}  // namespace

void run_adafactor(const StepJob& job, Adapt adapt) {
  std::vector<ParamJob> vectors;
  int64_t end = 0;
  for (int32_t i = 0; i < job.num_params; ++i) {
    const ParamJob& param = job.params[i];
    if (param.rows > 0) {
      step_matrices(job, param, adapt);
      continue;
    }
    vectors.push_back(param);
    vectors.back().state[0] = param.state[2];
    vectors.back().begin = end;
    end += param.numel;
  }
  if (vectors.empty()) return;
  StepJob rest = job;
  rest.kind = RuleKind::kAdafactorVector;
  rest.params = vectors.data();
  rest.num_params = static_cast<int32_t>(vectors.size());
  rest.total = end;
  run_layers(rest, adapt);
}

}  // namespace drivetrain::optim
