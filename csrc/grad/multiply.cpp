// Multiplies gradients chunk by chunk on all threads; see multiply.h.
#include "grad/multiply.h"

#include <atomic>
#include <cstdint>

#include "base/cpu_isa.h"
#include "base/parallel.h"
#include "grad/chunks.h"

namespace drivetrain::grad {

bool multiply(const std::vector<Gradient>& gradients, double factor) {
  const auto multiply_chunk = for_chosen_isa(DT_BY_ISA(grad, multiply_cpu));
  const std::vector<GradientChunk> chunks = chunks_of(gradients);
  std::atomic<bool> finite{true};
  parallel_for(0, static_cast<int64_t>(chunks.size()), kChunksPerThread, [&](int64_t begin, int64_t end) {
    bool all = true;
    for (int64_t i = begin; i < end; ++i) {
      all &= multiply_chunk(*chunks[i].values, chunks[i].begin, chunks[i].end, factor);
    }
    if (!all) finite = false;
  });
  return finite;
}

}  // namespace drivetrain::grad
