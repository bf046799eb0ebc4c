// Declares the Newton-Schulz iteration over batches of matrices.
#pragma once

#include <ATen/core/Tensor.h>

#include "optim/rules.h"

namespace drivetrain::optim {

// Runs a Newton-Schulz iteration with a polynomial of degree 5, which converges to the nearest orthogonal matrices.
// Both tensors are bfloat16 [number, rows, columns]. Every iteration reads one and writes the other, the first one
// `other`. A tall matrix is multiplied from the right. The polynomial's argument is then the smaller product with its
// own transpose, and nothing is transposed in memory.
void orthogonalize(at::Tensor matrices, at::Tensor other, const MuonArgs& args);

}  // namespace drivetrain::optim
