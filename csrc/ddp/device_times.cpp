// Implements device_times.h with events, through torch's device-independent interface.
#include "ddp/device_times.h"

#include <algorithm>

#include "base/stream_order.h"
#include "base/write_cuda.h"

namespace drivetrain::ddp {

DeviceTimes::DeviceTimes(c10::Device device, int64_t steps, size_t params, size_t probes)
    : device_(device),
      params_(params),
      first_probe_(static_cast<size_t>(steps) * (params + 1)),
      events_(first_probe_ + 2 * probes) {}

bool DeviceTimes::is_capturing() const { return is_capturing_on(device_); }

void DeviceTimes::set(size_t mark) {
  std::optional<DeviceEvent>& event = events_[mark];
  if (!event) event.emplace(device_, c10::EventFlag::BACKEND_DEFAULT);  // events with time
  event->record(*stream_on(device_));
}

// Asks for the last marks first: where one is missing, it is usually among them.
bool DeviceTimes::have_come() const {
  const c10::DeviceGuard guard(device_);
  const OutsideCaptures outside_captures;
  return std::all_of(events_.rbegin(), events_.rend(), [](const auto& event) { return !event || event->query(); });
}

// A gradient may come on a stream of its own before the mark of the first one.
double DeviceTimes::seconds(size_t from, size_t to) const {
  if (!events_[from] || !events_[to]) return 0;
  const c10::DeviceGuard guard(device_);
  const OutsideCaptures outside_captures;
  return std::max(0.0, 1e-3 * events_[from]->elapsed_ms(*events_[to]));
}

}  // namespace drivetrain::ddp
