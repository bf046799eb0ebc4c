// Declares how the host's bytes reach a device inside a CUDA graph. Needs no torch header.
#pragma once

#include <cstddef>

namespace drivetrain {

// Returns whether the stream is being captured into a CUDA graph.
bool is_capturing(void* stream);

// Writes host bytes to the device through kernel arguments. A graph stores those, so that no host memory has to outlive
// it.
void write_cuda(void* to, const void* from, size_t bytes, void* stream);

}  // namespace drivetrain
