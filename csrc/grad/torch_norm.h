// Declares the 2-norms of gradients with torch's bits, on all threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace drivetrain::grad {

// Returns at::stack(at::_foreach_norm(grads, 2)), to the bit. torch reads one gradient after the other and most of them
// on a single thread. Here each thread reads gradients of its own.
at::Tensor torch_norms(const std::vector<at::Tensor>& grads);

}  // namespace drivetrain::grad
