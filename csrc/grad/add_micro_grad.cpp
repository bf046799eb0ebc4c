// Accumulates a gradient on all threads.
#include "grad/add_micro_grad.h"

#include <algorithm>

#include "base/cpu_isa.h"
#include "base/parallel.h"

namespace drivetrain::grad {

void accumulate(const Addition& addition, int64_t numel) {
  const auto accumulate_cpu = for_chosen_isa(DT_BY_ISA(grad, accumulate_cpu));
  constexpr int64_t kPiece = 1 << 14;  // elements: a multiple of a tile
  constexpr int64_t kGrain = 4;        // pieces per thread at least
  parallel_for(0, (numel + kPiece - 1) / kPiece, kGrain, [&](int64_t begin, int64_t end) {
    accumulate_cpu(addition, begin * kPiece, std::min(end * kPiece, numel));
  });
}

}  // namespace drivetrain::grad
