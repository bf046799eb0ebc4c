// Queries the current stream through torch's device-independent interface, which needs no CUDA header or library.
#include "base/current_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace drivetrain {

void* current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

}  // namespace drivetrain
