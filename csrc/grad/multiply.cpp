// Runs passes over gradients chunk by chunk on all threads; see multiply.h.
#include "grad/multiply.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <cstring>

#include "base/cpu_isa.h"
#include "grad/chunks.h"

namespace drivetrain::grad {

bool multiply(const std::vector<Gradient>& gradients, const formats::Factors& factors) {
  const auto multiply_chunk = for_chosen_isa(baseline::multiply_cpu, avx2::multiply_cpu, avx512::multiply_cpu);
  const std::vector<Chunk> chunks = chunks_of(gradients);
  std::atomic<bool> finite{true};
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), kChunksPerThread, [&](int64_t begin, int64_t end) {
    bool all = true;
    for (int64_t i = begin; i < end; ++i) {
      all &= multiply_chunk(*chunks[i].values, chunks[i].begin, chunks[i].end, factors);
    }
    if (!all) finite = false;
  });
  return finite;
}

bool all_finite(const std::vector<Gradient>& gradients) { return multiply(gradients, {}); }

void zero(const std::vector<Gradient>& gradients) {
  const std::vector<Chunk> chunks = chunks_of(gradients);
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t width = formats::bytes_of(chunks[i].values->format);
      std::memset(static_cast<char*>(chunks[i].values->data) + chunks[i].begin * width, 0,
                  (chunks[i].end - chunks[i].begin) * width);
    }
  });
}

}  // namespace drivetrain::grad
