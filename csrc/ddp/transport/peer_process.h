// Tells whether another process of this host has ended.
#pragma once

#include <cstdint>

#include "ddp/transport/shm_segment.h"

namespace drivetrain::ddp {

// Follows one process, and no later one of the same number. Throws EnvironmentError if there is none.
class PeerProcess {
 public:
  explicit PeerProcess(int64_t pid);
  // Costs one system call; where the kernel or a sandbox has no pidfd_open, three.
  bool has_ended() const;

 private:
  int64_t pid_;
  Descriptor descriptor_;    // readable once the process has ended; none without pidfd_open
  uint64_t started_at_ = 0;  // without a descriptor: in the kernel's ticks since it booted
};

}  // namespace drivetrain::ddp
