// Sums the squares of all gradients, chunk by chunk on all threads.
#include "grad/norm.h"

#include <ATen/Parallel.h>

#include "base/cpu_isa.h"
#include "formats/total.h"

namespace drivetrain::grad {

using formats::kChunk;

double sum_of_squares(const std::vector<Gradient>& gradients) {
  const auto chunk_sum =
      for_chosen_isa(baseline::sum_of_squares_cpu, avx2::sum_of_squares_cpu, avx512::sum_of_squares_cpu);
  struct Chunk {
    const formats::TypedArray* values;
    int64_t begin, end;
  };
  std::vector<Chunk> chunks;
  for (const Gradient& gradient : gradients) {
    for (int64_t begin = 0; begin < gradient.numel; begin += kChunk) {
      chunks.push_back({&gradient.values, begin, std::min(begin + kChunk, gradient.numel)});
    }
  }
  std::vector<double> sums(chunks.size());
  constexpr int64_t kGrain = 8;  // chunks per thread at least
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] = chunk_sum(*chunks[i].values, chunks[i].begin, chunks[i].end);
  });
  formats::Total total;
  for (double sum : sums) total.add(sum);
  return total.get();
}

}  // namespace drivetrain::grad
