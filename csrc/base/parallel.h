// Runs a loop on torch's threads, which a forked child does not have.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

namespace drivetrain {

// Returns whether this process is a fork of one that had loaded the module. OpenMP's threads do not survive a fork, and
// a parallel loop waits for them for ever.
bool is_forked();

// Does what at::parallel_for does, in a forked child on one thread.
template <typename Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
  if (!is_forked()) {
    at::parallel_for(begin, end, grain, work);
  } else if (begin < end) {
    work(begin, end);
  }
}

}  // namespace drivetrain
