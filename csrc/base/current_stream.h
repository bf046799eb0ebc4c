// Declares the query for the stream on which torch enqueues a device's work.
#pragma once

#include <c10/core/Device.h>

namespace drivetrain {

// Returns the calling thread's current stream of that device as the runtime's handle (cudaStream_t on CUDA).
void* current_stream(c10::Device device);

}  // namespace drivetrain
