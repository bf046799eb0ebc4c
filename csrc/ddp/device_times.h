// Declares the measurement of a device's steps by marks in its streams, whose times the host reads without waiting.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/device_event.h"

namespace drivetrain::ddp {

// Keeps when each gradient came on a device in a few steps, and how long the device took for probes.
//
// A mark lies behind the work that the device's current stream has so far. The host reads the marks in a later step. A
// mark that is set again moves.
class DeviceTimes {
 public:
  DeviceTimes(c10::Device device, int64_t steps, size_t params, size_t probes);

  // Returns true if the device's current stream is being captured into a CUDA graph, where no mark may be set.
  bool is_capturing() const;

  // Mark the first gradient of a step, each of its gradients, and both ends of a probe.
  void begin_step(int64_t step) { set(mark_of(step)); }
  void note_gradient(int64_t step, size_t param) { set(mark_of(step) + 1 + param); }
  void begin_probe(size_t probe) { set(first_probe_ + 2 * probe); }
  void end_probe(size_t probe) { set(first_probe_ + 2 * probe + 1); }

  // Returns true if the device has reached all marks.
  bool have_come() const;

  // The following two require have_come(). They return 0 where a mark was not set.

  // Returns the seconds from the step's first gradient to the parameter's.
  double gradient_s(int64_t step, size_t param) const { return seconds(mark_of(step), mark_of(step) + 1 + param); }
  // Returns the seconds between both ends.
  double probe_s(size_t probe) const { return seconds(first_probe_ + 2 * probe, first_probe_ + 2 * probe + 1); }

 private:
  void set(size_t mark);
  double seconds(size_t from, size_t to) const;
  size_t mark_of(int64_t step) const { return static_cast<size_t>(step) * (params_ + 1); }

  const c10::Device device_;
  const size_t params_;
  const size_t first_probe_;
  std::vector<std::optional<DeviceEvent>> events_;  // by mark; empty: not set
};

}  // namespace drivetrain::ddp
