// Bounds how much of the other ranks' memory is resident in this process. Needs no torch header.
#pragma once

#include <cstdint>
#include <vector>

namespace drivetrain::ddp {

// A page that several processes touch counts as resident in each of them, and takes part of each one's page tables:
// ranks that touched all memory of all others would show the square of their number. What a rank adds up in every step
// stays resident, which is 1 / size of each other's memory; what it adds up for a rank that is late stays until there
// is too much of that. Values are never lost: only this process's entries for the pages are.
//
// Not thread safe.
class Residency {
 public:
  // others: where each other rank's memory begins in this process, `bytes` bytes each, of which nothing is resident.
  Residency(std::vector<char*> others, int64_t bytes);

  // To be called before this process reads or writes these bytes of all of them. is_usual: it does so in every step.
  void touch(int64_t begin, int64_t end, bool is_usual);
  // As far as touch() was called, over all others.
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
