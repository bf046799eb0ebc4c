// Declares a test that another process of this host has ended.
#pragma once

#include <cstdint>

#include "ddp/transport/shm/shm_segment.h"

namespace drivetrain::ddp {

// Follows one process, and no later process of the same number.
class PeerProcess {
 public:
  // Throws EnvironmentError if there is no such process.
  explicit PeerProcess(int64_t pid);
  // Costs one system call, or three where the kernel or a sandbox has no pidfd_open.
  bool has_ended() const;

 private:
  int64_t pid_;
  Descriptor descriptor_;    // readable once the process has ended; none without pidfd_open
  uint64_t started_at_ = 0;  // used without a descriptor; clock ticks since boot
};

}  // namespace drivetrain::ddp
