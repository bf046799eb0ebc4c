// Asks torch for the current stream through its device-independent interface: no CUDA header, no CUDA library.
#include "base/current_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace drivetrain {

void* current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

}  // namespace drivetrain
