// Runs both passes of steps with a trust ratio, a few parameters at a time; see trust_ratio.h.
#include "optim/trust_ratio.h"

#include <algorithm>
#include <vector>

#include "base/cpu_isa.h"
#include "base/parallel.h"
#include "formats/total.h"
#include "optim/launch.h"

namespace drivetrain::optim {
namespace {

using formats::kChunk;
// Elements per pair of passes: the second pass finds parameters, gradients and states in the cache, unless a single
// parameter is larger.
constexpr int64_t kWave = 1 << 18;

// Sums over the parameters [first, last).
std::vector<TrustRatioSums> trust_ratio_sums_of(const StepJob& job, int32_t first, int32_t last) {
  const auto sums_of = for_chosen_isa(DT_BY_ISA(optim, trust_ratio_sums_cpu));
  struct Chunk {
    int32_t param;
    int64_t begin;
  };
  std::vector<Chunk> chunks;
  for (int32_t i = first; i < last; ++i) {
    for (int64_t begin = 0; begin < job.params[i].numel; begin += kChunk) chunks.push_back({i, begin});
  }
  std::vector<TrustRatioSums> sums(chunks.size());
  constexpr int64_t kGrain = 8;  // chunks per thread at least
  parallel_for(0, static_cast<int64_t>(chunks.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const ParamJob& param = job.params[chunks[i].param];
      sums[i] = sums_of(job, param, chunks[i].begin, std::min(chunks[i].begin + kChunk, param.numel));
    }
  });
  std::vector<TrustRatioSums> totals;
  for (size_t i = 0; i < chunks.size();) {
    const int32_t param = chunks[i].param;
    formats::SumOfChunks params, directions;
    for (; i < chunks.size() && chunks[i].param == param; ++i) {
      params.add(sums[i].param);
      directions.add(sums[i].direction);
    }
    totals.push_back({params.get(), directions.get()});
  }
  return totals;
}

// A copy of a job in which every parameter has its own rule.
struct OwnRules {
  explicit OwnRules(const StepJob& shared) : params(shared.params, shared.params + shared.num_params), job(shared) {
    rules.reserve(params.size());
    for (ParamJob& param : params) {
      rules.push_back(shared.rules[param.rule]);
      param.rule = static_cast<int32_t>(rules.size()) - 1;
    }
    job.params = params.data();
    job.rules = rules.data();
    job.num_rules = static_cast<int32_t>(rules.size());
  }

  std::vector<ParamJob> params;
  std::vector<RuleArgs> rules;
  StepJob job;
};

}  // namespace

void run_trust_ratio(const StepJob& shared, Adapt adapt) {
  OwnRules own(shared);
  const StepJob& job = own.job;
  for (int32_t first = 0; first < job.num_params;) {
    int32_t last = first + 1;
    const int64_t begin = job.params[first].begin;
    while (last < job.num_params && job.params[last].begin + job.params[last].numel - begin <= kWave) ++last;
    const std::vector<TrustRatioSums> sums = trust_ratio_sums_of(job, first, last);
    for (int32_t i = first; i < last; ++i) adapt(own.rules[i], sums[i - first], job.params[i].numel);
    run_step_cpu(job, begin, last < job.num_params ? job.params[last].begin : job.total);
    first = last;
  }
}

}  // namespace drivetrain::optim
