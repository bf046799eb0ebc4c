// Copies of small tensors between the host and a device for which the host does not wait.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace drivetrain {

// A copy on that device, made by its current stream. `on_host` may be changed as soon as this returns.
at::Tensor copied_to(const at::Tensor& on_host, c10::Device device);

// A device's value on its way to the host, which asks later whether it has come.
class LateValue {
 public:
  explicit LateValue(const at::Tensor& on_device);
  bool has_come() const { return event_.query(); }
  // Only once it has come.
  const at::Tensor& value() const;

 private:
  at::Tensor on_host_;  // pinned
  c10::Event event_;
};

}  // namespace drivetrain
