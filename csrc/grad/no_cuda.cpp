// Answers for the accumulation of gradients on CUDA in a build without nvcc.
#include "base/no_cuda.h"

#include "grad/add_micro_grad.h"

namespace drivetrain::grad {

void accumulate_cuda(const Addition&, int64_t, void*) { refuse_cuda(); }

}  // namespace drivetrain::grad
