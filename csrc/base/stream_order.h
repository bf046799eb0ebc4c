// Declares the ordering of work between streams. It uses torch's device-independent interface and no CUDA header.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <optional>

namespace drivetrain {

// Returns the calling thread's current stream of that device; nullopt for the CPU, which has no streams.
std::optional<c10::Stream> stream_on(c10::Device device);

// Returns true if the device's current stream is being captured into a CUDA graph. A query of an event that was
// recorded there would end the capture.
bool is_capturing_on(c10::Device device);
bool is_capturing(const c10::Stream& stream);

// Makes work enqueued on `later` from now on wait for the work enqueued on `earlier` so far. The host does not wait.
void run_after(const c10::Stream& later, const c10::Stream& earlier);

// Lets the allocator reuse memory, once it is freed, only after the work that the stream has then.
void record_use(const c10::Storage& memory, const c10::Stream& stream);

}  // namespace drivetrain
