// glibc's rule behind heap.h.
#include "base/heap.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>

namespace drivetrain {
namespace {

// The largest block that moves the threshold, with what malloc adds to it: see "dynamic mmap threshold" in mallopt(3).
constexpr int64_t kLargestThreshold = (32 << 20) - (64 << 10);
constexpr int64_t kTensors = 4;

}  // namespace

// When a block is freed that malloc had from the system directly, because it was above a threshold, its size becomes
// the threshold; and twice that is how much may be free at the heap's top. Nobody writes to the block, so that it costs
// no memory.
void keep_freed_memory(int64_t bytes) {
  void* volatile block = std::malloc(std::min(kTensors * bytes, kLargestThreshold));
  std::free(block);
}

void return_freed_memory() { malloc_trim(0); }

}  // namespace drivetrain
