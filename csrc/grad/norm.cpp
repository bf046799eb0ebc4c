// Sums the squares of all gradients, chunk by chunk on all threads.
#include "grad/norm.h"

#include "base/cpu_isa.h"
#include "base/parallel.h"
#include "formats/total.h"
#include "grad/chunks.h"

namespace drivetrain::grad {

std::vector<double> chunk_sums(const std::vector<Gradient>& gradients) {
  const auto chunk_sum = for_chosen_isa(DT_BY_ISA(grad, sum_of_squares_cpu));
  const std::vector<GradientChunk> chunks = chunks_of(gradients);
  std::vector<double> sums(chunks.size());
  parallel_for(0, static_cast<int64_t>(chunks.size()), kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] = chunk_sum(*chunks[i].values, chunks[i].begin, chunks[i].end);
  });
  return sums;
}

double sum_of_chunks(const std::vector<double>& sums) {
  formats::SumOfChunks total;
  for (double sum : sums) total.add(sum);
  return total.get();
}

double sum_of_squares(const std::vector<Gradient>& gradients) { return sum_of_chunks(chunk_sums(gradients)); }

}  // namespace drivetrain::grad
