// Declares the bound on the other ranks' memory that is resident in this process. Needs no torch header.
#pragma once

#include <cstdint>
#include <vector>

namespace drivetrain::ddp {

// A page that several processes touch counts as resident in each of them, and takes space in each one's page tables. If
// every rank touched all memory of all others, this would grow with the square of their number. Memory that a rank sums
// in every step stays resident: 1 / size of each other rank's. Memory that it sums for a late rank stays until that
// part exceeds a limit. Values are never lost, as only this process's page table entries go.
//
// Invariant: the resident part, as far as touch() was called, stays below the limit. Not thread safe.
class Residency {
 public:
  // others: start of each other rank's memory in this process, `bytes` bytes each, of which nothing is resident.
  Residency(std::vector<char*> others, int64_t bytes);

  // Notes that this process is about to read or write these bytes of all others. is_usual: it does so in every step.
  void touch(int64_t begin, int64_t end, bool is_usual);
  // Returns the resident bytes over all others, as far as touch() was called.
  int64_t resident_bytes() const;

  static constexpr int64_t kGranule = 64 << 10;

 private:
  enum class State : uint8_t { kAbsent, kVisited, kUsual };

  void drop(bool usual_too);
  void advise(int64_t granule, int64_t end_granule, int advice);

  const std::vector<char*> others_;
  const int64_t bytes_;
  const int64_t most_resident_;  // granules
  std::vector<State> states_;    // [granules]
  int64_t resident_ = 0;         // granules that are not absent
  bool can_populate_ = true;
};

}  // namespace drivetrain::ddp
