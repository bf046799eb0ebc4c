// Declares DeviceEvent, whose calls make a CUDA context on no GPU but the event's.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>
#include <utility>

namespace drivetrain {

// torch's event of a device. torch's own calls end with setting the thread's device, which CUDA gives a context then.
class DeviceEvent {
 public:
  explicit DeviceEvent(c10::Device device, c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT)
      : device_(device), event_(std::in_place, device.type(), flag) {}
  DeviceEvent(DeviceEvent&&) = default;
  DeviceEvent& operator=(DeviceEvent&&) = default;
  ~DeviceEvent() {
    try {
      const c10::DeviceGuard guard(device_);
      event_.reset();
    } catch (...) {  // the device has failed
    }
  }

  void record(const c10::Stream& stream) {
    const c10::DeviceGuard guard(device_);
    event_->record(stream);
  }
  void block(const c10::Stream& stream) const {
    const c10::DeviceGuard guard(device_);
    event_->block(stream);
  }
  bool query() const {
    const c10::DeviceGuard guard(device_);
    return event_->query();
  }
  void synchronize() const {
    const c10::DeviceGuard guard(device_);
    event_->synchronize();
  }
  double elapsed_ms(const DeviceEvent& later) const {
    const c10::DeviceGuard guard(device_);
    return event_->elapsedTime(*later.event_);
  }

 private:
  c10::Device device_;
  std::optional<c10::Event> event_;
};

}  // namespace drivetrain
