// Declares non-blocking copies of small tensors between the host and a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "base/device_event.h"

namespace drivetrain {

// Returns a copy on that device, enqueued on its current stream. `on_host` may be changed as soon as this returns.
at::Tensor copied_to(const at::Tensor& on_host, c10::Device device);

// Copies a device tensor to the host without blocking. The host polls has_come() and then reads value().
class LateValue {
 public:
  explicit LateValue(const at::Tensor& on_device);
  bool has_come() const { return event_.query(); }
  // Blocks the host until it has come.
  void wait() const { event_.synchronize(); }
  // Requires has_come(); throws InvariantError otherwise.
  const at::Tensor& value() const;

 private:
  at::Tensor on_host_;  // pinned
  DeviceEvent event_;
};

}  // namespace drivetrain
