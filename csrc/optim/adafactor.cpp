// Runs Adafactor's passes on the CPU, one matrix parameter after the other; see adafactor.h.
#include "optim/adafactor.h"

#include <algorithm>
#include <memory>

#include "base/cpu_isa.h"
#include "base/parallel.h"

namespace drivetrain::optim {
namespace {

constexpr int64_t kElements = 1 << 15;  // elements per thread at least

// Calls work(begin, end) for parts of 0 .. count, items of `elements` elements each, on all threads.
template <class Work>
void in_parallel(int64_t count, int64_t elements, const Work& work) {
  parallel_for(0, count, std::max<int64_t>(1, kElements / elements), work);
}

RuleArgs fitted(const StepJob& job, const ParamJob& param) {
  AdafactorArgs args = job.rules[param.rule].as<AdafactorArgs>();
  args.fit(param.rows, param.columns);
  return RuleArgs::of(args);
}

void add_up(const StepJob& job, const Factored& of) {
  const auto sums = for_chosen_isa(DT_BY_ISA(optim, adafactor_sums_cpu));
  const int64_t count = num_units(of);
  in_parallel(count, job.params[of.param].numel / count, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) sums(job, of, unit);
  });
}

void update(const StepJob& job, const Factored& of) {
  const auto updated = for_chosen_isa(DT_BY_ISA(optim, adafactor_update_cpu));
  in_parallel(of.matrices, of.rows + of.columns, [&](int64_t begin, int64_t end) { updated(job, of, begin, end); });
}

void step_matrices(StepJob job, ParamJob param, Adapt adapt) {
  const RuleArgs args = fitted(job, param);
  param.rule = 0;
  param.begin = 0;
  job.params = &param;
  job.num_params = 1;
  job.rules = &args;
  job.num_rules = 1;
  job.total = param.numel;
  Factoring factoring = factoring_of(&param, 1);
  const auto memory = std::make_unique_for_overwrite<double[]>(factoring.num_doubles);
  place_factors(factoring, &param, memory.get());
  add_up(job, factoring.matrices.front());
  update(job, factoring.matrices.front());
  run_trust_ratio(job, adapt);
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
    vectors.back().begin = end;
    end += param.numel;
  }
  if (vectors.empty()) return;
  StepJob rest = job;
  rest.params = vectors.data();
  rest.num_params = static_cast<int32_t>(vectors.size());
  rest.total = end;
  run_trust_ratio(rest, adapt);
}

}  // namespace drivetrain::optim
