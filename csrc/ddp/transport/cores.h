// Declares which cores processes may use, and a test that each can have a core of its own.
#pragma once

#include <cstdint>
#include <vector>

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

}  // namespace drivetrain::ddp
