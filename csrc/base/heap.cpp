// Implements heap.h with glibc's dynamic mmap threshold.
#include "base/heap.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>

namespace drivetrain {
namespace {

// Largest block, including malloc's overhead, that moves the threshold: see "dynamic mmap threshold" in mallopt(3).
constexpr int64_t kLargestThreshold = (32 << 20) - (64 << 10);
constexpr int64_t kTensors = 4;

}  // namespace

// Raises malloc's mmap threshold, above which malloc maps a block directly from the system. Freeing such a block makes
// its size the threshold, and twice its size the free memory that the heap's top keeps. The block here is never
// written, so it occupies no memory.
void keep_freed_memory(int64_t bytes) {
  void* volatile block = std::malloc(std::min(kTensors * bytes, kLargestThreshold));
  std::free(block);
}

void return_freed_memory() { malloc_trim(0); }

}  // namespace drivetrain
