// Both passes over layers, a few parameters at a time; see layer.h.
#include "optim/layer.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "base/cpu_isa.h"
#include "grad/total.h"
#include "optim/launch.h"

namespace drivetrain::optim {
namespace {

using grad::kChunk;
// Elements between the two passes: their parameters, gradients and states stay in the cache from one to the other,
// unless a single parameter is larger.
constexpr int64_t kWave = 1 << 18;

void adapt_all(StepJob& job, std::vector<RuleArgs>& rules, int32_t first, int32_t last, Adapt adapt) {
  const auto sums_of = for_chosen_isa(baseline::layer_sums_cpu, avx2::layer_sums_cpu, avx512::layer_sums_cpu);
  struct Chunk {
    int32_t param;
    int64_t begin;
  };
  std::vector<Chunk> chunks;
  for (int32_t i = first; i < last; ++i) {
    for (int64_t begin = 0; begin < job.params[i].numel; begin += kChunk) chunks.push_back({i, begin});
  }
  std::vector<LayerSums> sums(chunks.size());
  constexpr int64_t kGrain = 8;  // chunks that are worth a thread
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const ParamJob& param = job.params[chunks[i].param];
      sums[i] = sums_of(job, param, chunks[i].begin, std::min(chunks[i].begin + kChunk, param.numel));
    }
  });
  for (size_t i = 0; i < chunks.size();) {
    const int32_t param = chunks[i].param;
    grad::Total params, directions;
    for (; i < chunks.size() && chunks[i].param == param; ++i) {
      params.add(sums[i].param);
      directions.add(sums[i].direction);
    }
    adapt(rules[param], {params.get(), directions.get()}, job.params[param].numel);
  }
}

}  // namespace

void run_layers(const StepJob& shared, Adapt adapt) {
  // Every parameter gets a rule of its own.
  std::vector<ParamJob> params(shared.params, shared.params + shared.num_params);
  std::vector<RuleArgs> rules;
  rules.reserve(params.size());
  for (ParamJob& param : params) {
    rules.push_back(shared.rules[param.rule]);
    param.rule = static_cast<int32_t>(rules.size()) - 1;
  }
  StepJob job = shared;
  job.params = params.data();
  job.rules = rules.data();
  job.num_rules = static_cast<int32_t>(rules.size());
  for (int32_t first = 0; first < job.num_params;) {
    int32_t last = first + 1;
    const int64_t begin = params[first].begin;
    while (last < job.num_params && params[last].begin + params[last].numel - begin <= kWave) ++last;
    adapt_all(job, rules, first, last, adapt);
    run_step_cpu(job, begin, last < job.num_params ? params[last].begin : job.total);
    first = last;
  }
}

}  // namespace drivetrain::optim
