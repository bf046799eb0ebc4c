// The streams of a device for torch that run later, in any order that their events allow, and the memory they work on.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace late {

inline const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

// Guards everything here: autograd's threads enqueue work while the main thread waits for them.
std::recursive_mutex& mutex();

// Reached once everything that a stream had enqueued before it has run.
using Moment = std::shared_ptr<bool>;

// The calling thread's current stream.
int64_t current_stream();
// A further stream, whose number no test uses.
int64_t new_hidden_stream();

void enqueue(int64_t stream, std::function<void()> run);
Moment moment_of(int64_t stream);
void await(int64_t stream, const Moment& moment);
// Runs streams in a drawn order until the moment is reached, and counts one host wait. Throws where the test has not
// allowed the host to wait.
void wait_on_host(const Moment& moment);

// Whether the memory at that address was freed and may be another tensor's by now.
const bool* is_others(const void* data);
void count_late(const bool* is_others);
c10::Allocator* device_allocator();

// The process group on this device's tensors (late_group.cpp).
void bind_group(pybind11::module_& m);

}  // namespace late
