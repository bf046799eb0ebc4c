// Declares facts about processes of this host: the cores that they may use, and whether they have ended.
#pragma once

#include <cstdint>
#include <vector>

#include "ddp/transport/shm/shm_segment.h"

namespace drivetrain::ddp {

// A set of cores: plain data, which ranks send each other.
struct CoreSet {
  static constexpr int kMostCores = 8192;  // the largest number that Linux supports
  uint64_t words[kMostCores / 64] = {};

  bool has(int core) const { return (words[core / 64] >> core % 64 & 1) != 0; }
  void add(int core) { words[core / 64] |= uint64_t{1} << core % 64; }
};

// Returns the cores that the calling thread may use; none where the kernel does not tell.
CoreSet cores_of_this_thread();

// Returns true if all processes can run at once, each on a core of its own.
bool is_a_core_for_each(const std::vector<CoreSet>& processes);

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
