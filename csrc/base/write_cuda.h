// Declares how the host's bytes reach a device inside a CUDA graph. Needs no torch header.
#pragma once

#include <cstddef>

namespace drivetrain {

// Whether work on the stream is being captured into a CUDA graph.
bool is_capturing(void* stream);

// Writes bytes of the host to the device through arguments of kernels: a graph keeps those, so that nothing of the
// host's has to outlive it.
void write_cuda(void* to, const void* from, size_t bytes, void* stream);

}  // namespace drivetrain
