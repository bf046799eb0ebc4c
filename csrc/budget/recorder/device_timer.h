// Declares DeviceTimer, which measures how long a call takes on the device that runs it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <vector>

#include "base/device_event.h"

namespace drivetrain::budget {

// Returns the time of the host's steady clock in seconds.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Measures with events on an accelerator, where a call that returns at once may still run, and by the clock on the CPU.
class DeviceTimer {
 public:
  explicit DeviceTimer(c10::Device device) : device_(device), begin_(now()) {
    if (device.is_cpu()) return;
    events_.emplace_back(device, c10::EventFlag::BACKEND_DEFAULT);
    events_.emplace_back(device, c10::EventFlag::BACKEND_DEFAULT);
    events_[0].record(stream());
  }
  void stop() {
    seconds_ = now() - begin_;
    if (!events_.empty()) events_[1].record(stream());
  }
  // Returns the seconds from construction to stop(). Waits for the device.
  double seconds() const {
    if (events_.empty()) return seconds_;
    events_[1].synchronize();
    return events_[0].elapsed_ms(events_[1]) / 1e3;
  }

 private:
  c10::Stream stream() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

  c10::Device device_;
  double begin_;
  double seconds_ = 0;
  std::vector<DeviceEvent> events_;
};

}  // namespace drivetrain::budget
