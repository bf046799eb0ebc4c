// How long calls take on the device that they run on.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <vector>

namespace drivetrain::budget {

// Seconds of the host.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A call that takes no time on the host may take some on its device.
class Stopwatch {
 public:
  explicit Stopwatch(c10::Device device) : device_(device), begin_(now()) {
    if (device.is_cpu()) return;
    events_.emplace_back(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    events_.emplace_back(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    events_[0].record(stream());
  }
  void stop() {
    seconds_ = now() - begin_;
    if (!events_.empty()) events_[1].record(stream());
  }
  // Waits for the device.
  double seconds() const {
    if (events_.empty()) return seconds_;
    events_[1].synchronize();
    return events_[0].elapsedTime(events_[1]) / 1e3;
  }

 private:
  c10::Stream stream() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

  c10::Device device_;
  double begin_;
  double seconds_ = 0;
  std::vector<c10::Event> events_;
};

}  // namespace drivetrain::budget
