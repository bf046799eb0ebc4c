// Names the phases of a training step, to which the monitor attributes its time. Needs no torch header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace drivetrain::trace {

// The order follows PHASES in python/drivetrain/phases.py.
enum class Phase : int32_t {
  kHost,  // everything that no other phase claims
  kData,
  kCopy,
  kForward,
  kBackward,
  kCommunication,
  kRecomputation,
  kOptimizer,
  kCheckpoint,
};

inline constexpr size_t kNumPhases = 9;

}  // namespace drivetrain::trace
