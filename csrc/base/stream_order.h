// Orders work on a device's streams through torch's device-independent interface, without a CUDA header.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

namespace drivetrain {

// The calling thread's current stream of that device; nothing for the CPU, which has none.
std::optional<c10::Stream> stream_on(c10::Device device);

// Lets what `later` is given from now on run after what `earlier` has been given so far. The host does not wait.
void run_after(const c10::Stream& later, const c10::Stream& earlier);

}  // namespace drivetrain
