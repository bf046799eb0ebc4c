// Runs the step's loop on threads; see launch.h.
#include "optim/launch.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "base/cpu_isa.h"
#include "base/parallel.h"
#include "formats/summation.h"
#include "optim/precision.h"

namespace drivetrain::optim {

namespace {

// Updates part by part, so that the statistics of each are the sums of one call, for any number of threads.
void run_parts(const StepJob& job, int64_t begin, int64_t end) {
  const auto step = for_chosen_isa(DT_BY_ISA(optim, step_cpu));
  constexpr int64_t kPart = 8 * formats::kChunk;  // elements; in smaller parts, processors prefetch less
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (int32_t i = find_param(job, begin); i < job.num_params && job.params[i].begin < end; ++i) {
    const ParamJob& param = job.params[i];
    for (int64_t at = 0; at < param.numel; at += kPart) {
      parts.emplace_back(param.begin + at, param.begin + std::min(at + kPart, param.numel));
    }
  }
  parallel_for(0, static_cast<int64_t>(parts.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) step(job, parts[i].first, parts[i].second);
  });
}

}  // namespace

void run_step_cpu(const StepJob& job, int64_t begin, int64_t end) {
  if (job.statistics != nullptr) return run_parts(job, begin, end);
  const auto step = for_chosen_isa(DT_BY_ISA(optim, step_cpu));
  constexpr int64_t kGrain = (1 << 15) / kBlock;  // blocks per thread at least
  parallel_for(begin / kBlock, num_blocks(end), kGrain, [&](int64_t from, int64_t to) {
    step(job, std::max(from * kBlock, begin), std::min(to * kBlock, end));
  });
}

int num_step_threads() {
  std::atomic<int> threads{0};
  parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) { ++threads; });
  return threads;
}

}  // namespace drivetrain::optim
