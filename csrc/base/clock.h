// Reads the monotonic clock. Needs no torch header.
#pragma once

#include <chrono>
#include <cstdint>

namespace drivetrain {

// Returns nanoseconds of the monotonic clock.
inline int64_t clock_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace drivetrain
