// Which cores processes may use, and whether there is one for each of them.
#pragma once

#include <cstdint>
#include <vector>

namespace drivetrain::ddp {

// The cores that the calling thread may use: plain data, which ranks send each other.
struct CoreSet {
  static constexpr int kMostCores = 8192;  // Linux knows no more
  uint64_t words[kMostCores / 64] = {};

  bool has(int core) const { return (words[core / 64] >> core % 64 & 1) != 0; }
  void add(int core) { words[core / 64] |= uint64_t{1} << core % 64; }
};

// None where the kernel does not tell.
CoreSet cores_of_this_thread();

// Whether all processes can run at once, each on a core of its own that it may use.
bool is_a_core_for_each(const std::vector<CoreSet>& processes);

}  // namespace drivetrain::ddp
