// The stream on which torch enqueues a device's work.
#pragma once

#include <c10/core/Device.h>

namespace drivetrain {

// The calling thread's current stream of that device, as its runtime's handle (cudaStream_t on CUDA).
void* current_stream(c10::Device device);

}  // namespace drivetrain
