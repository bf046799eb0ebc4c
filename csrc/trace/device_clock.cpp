// Implements the device's clock with CUDA events, through torch's device-independent interface.
#include "trace/device_clock.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "base/device_event.h"
#include "base/stream_order.h"
#include "base/write_cuda.h"

namespace drivetrain::trace {
namespace {

class EventClock final : public DeviceClock {
 public:
  EventClock(c10::Device device, size_t num_slots) : device_(device), events_(num_slots) {}

  bool mark(size_t slot) noexcept override {
    try {
      if (is_capturing_on(device_)) return false;  // such an event has no time
      std::optional<DeviceEvent>& event = events_[slot];
      if (!event) event.emplace(device_, c10::EventFlag::BACKEND_DEFAULT);  // events with time
      event->record(*stream_on(device_));
      return true;
    } catch (...) {  // the device has failed, which the training's own next call reports
      return false;
    }
  }

  std::optional<int64_t> elapsed_ns(size_t slot) noexcept override {
    try {
      const c10::DeviceGuard guard(device_);
      const OutsideCaptures outside_captures;
      std::optional<DeviceEvent>& event = events_[slot];
      if (!event->query()) return std::nullopt;
      const double elapsed_ms = last_ ? last_->elapsed_ms(*event) : 0.0;
      // The slot's next writer takes the event before, so that this one keeps its time.
      std::swap(last_, event);
      return std::llround(elapsed_ms * 1e6);
    } catch (...) {  // the device has failed
      return 0;
    }
  }

  void restart() noexcept override { last_.reset(); }

 private:
  const c10::Device device_;
  std::vector<std::optional<DeviceEvent>> events_;  // made by their first writer
  std::optional<DeviceEvent> last_;                 // the mark that was read last
};

}  // namespace

std::unique_ptr<DeviceClock> make_device_clock(int device, size_t num_slots) {
  return std::make_unique<EventClock>(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)),
                                      num_slots);
}

}  // namespace drivetrain::trace
