// Declares the times at which a device reaches the marks of the trace. Needs no torch header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace drivetrain::trace {

// Marks the work that is enqueued on a device, one mark per slot of the ring, and tells later when the device got
// there. The host never waits. A writer has a slot to itself until the reader has read it.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;

  // Marks the current stream of the calling thread. Returns false where no mark can be set, as during a capture.
  virtual bool mark(size_t slot) noexcept = 0;

  // Returns the nanoseconds between the mark that was read before and this one. Returns 0 for the first and after the
  // device has failed, and nullopt until the device reaches it. Marks are read in the order of the ring, by one thread
  // at a time.
  virtual std::optional<int64_t> elapsed_ns(size_t slot) noexcept = 0;

  // Forgets which mark was read last.
  virtual void restart() noexcept = 0;
};

// Returns a clock with events of that CUDA device for that many slots.
std::unique_ptr<DeviceClock> make_device_clock(int device, size_t num_slots);

}  // namespace drivetrain::trace
