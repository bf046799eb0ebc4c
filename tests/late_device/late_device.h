// Declares the streams of a test device, which run late and in any order that their events allow, and its memory.
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

// Guards all state of the device, because autograd's threads enqueue work while the main thread waits for them.
std::recursive_mutex& mutex();

// A point on a stream, which is reached once all work enqueued before it on that stream has run.
struct Point {
  bool is_reached = false;
  double time = 0;  // of the model
};
using Moment = std::shared_ptr<Point>;

// The model of time: work takes seconds on its stream, begins no earlier than the host enqueued it, and waits for the
// moments that its stream awaits. It does not depend on the order in which the streams run.
struct Model {
  double seconds_per_byte = 0;  // of copies between the device and the host
  double seconds_per_flop = 0;  // of matrix products
  double host = 0;              // the host's time, which waits and advance() move
};
extern Model model;

// Returns the calling thread's current stream.
int64_t current_stream();
// Returns a new stream, whose number no test uses.
int64_t new_hidden_stream();

void enqueue(int64_t stream, std::function<void()> run, double seconds = 0);
Moment moment_of(int64_t stream);
void await(int64_t stream, const Moment& moment);
// Runs streams in a random order until the moment is reached, and counts one host wait. Throws std::runtime_error if
// the test has not allowed the host to wait.
void wait_on_host(const Moment& moment);

// Returns a flag that becomes true once the memory at that address may belong to another tensor. Null for host memory.
const bool* is_others(const void* data);
// Counts an access to memory that may belong to another tensor.
void count_late(const bool* is_others);
c10::Allocator* device_allocator();

// Binds the process group for this device's tensors (late_group.cpp).
void bind_group(pybind11::module_& m);

}  // namespace late
