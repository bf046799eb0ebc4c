// Runs the step's loop on threads; see launch.h.
#include "optim/launch.h"

#include <algorithm>
#include <atomic>

#include "base/cpu_isa.h"
#include "base/parallel.h"
#include "optim/precision.h"

namespace drivetrain::optim {

void run_step_cpu(const StepJob& job, int64_t begin, int64_t end) {
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
