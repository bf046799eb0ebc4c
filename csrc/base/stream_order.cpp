// Implements stream_order.h with events.
#include "base/stream_order.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/device_event.h"
#include "base/write_cuda.h"

namespace drivetrain {

std::optional<c10::Stream> stream_on(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

bool is_capturing_on(c10::Device device) {
  if (!device.is_cuda()) return false;
  const c10::DeviceGuard guard(device);  // a question on another device could make a context there
  return is_capturing(*stream_on(device));
}

bool is_capturing(const c10::Stream& stream) {
  return stream.device().is_cuda() && is_capturing(static_cast<void*>(stream.native_handle()));
}

void run_after(const c10::Stream& later, const c10::Stream& earlier) {
  if (later == earlier) return;
  DeviceEvent event(earlier.device());
  event.record(earlier);
  event.block(later);
}

void record_use(const c10::Storage& memory, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(memory.data_ptr(), stream);
}

}  // namespace drivetrain
