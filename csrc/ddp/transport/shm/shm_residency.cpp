// Bounds resident memory by madvise on ranges of granules.
#include "ddp/transport/shm/shm_residency.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

namespace drivetrain::ddp {
namespace {

// MADV_POPULATE_WRITE of Linux 5.14, which older C libraries do not name.
constexpr int kPopulate = 23;
// This much may always be resident.
constexpr int64_t kAlwaysAllowed = 32 << 20;

// Limits the resident part of the other ranks' memory, as a multiple of one rank's memory. The usual part is below one.
// Four ranks may keep all: pages that come and go cost time where ranks outnumber cores and take each other's chunks.
constexpr int64_t kMostMemories = 3;

int64_t most_granules(int64_t bytes, int64_t num_others) {
  if (num_others == 0) return std::numeric_limits<int64_t>::max();
  return std::max(kMostMemories * bytes, kAlwaysAllowed) / (num_others * Residency::kGranule);
}

}  // namespace

Residency::Residency(std::vector<char*> others, int64_t bytes)
    : others_(std::move(others)),
      bytes_(bytes),
      most_resident_(most_granules(bytes, static_cast<int64_t>(others_.size()))),
      states_((bytes + kGranule - 1) / kGranule, State::kAbsent) {}

void Residency::touch(int64_t begin, int64_t end, bool is_usual) {
  if (begin == end) return;
  const int64_t first = begin / kGranule, last = (end - 1) / kGranule;
  const auto absent = [&] { return std::count(states_.begin() + first, states_.begin() + last + 1, State::kAbsent); };
  if (absent() > 0) {
    if (resident_ + absent() > most_resident_) drop(/*usual_too=*/false);
    if (resident_ + absent() > most_resident_) drop(/*usual_too=*/true);
    resident_ += absent();
    // One call costs less than a page fault per page.
    for (int64_t granule = first; granule <= last; ++granule) {
      if (states_[granule] == State::kAbsent && can_populate_) advise(granule, granule + 1, kPopulate);
    }
  }
  for (int64_t granule = first; granule <= last; ++granule) {
    states_[granule] = std::max(states_[granule], is_usual ? State::kUsual : State::kVisited);
  }
}

int64_t Residency::resident_bytes() const { return resident_ * kGranule * static_cast<int64_t>(others_.size()); }

void Residency::drop(bool usual_too) {
  const auto goes = [&](State state) { return state == State::kVisited || (usual_too && state == State::kUsual); };
  const int64_t count = static_cast<int64_t>(states_.size());
  for (int64_t begin = 0; begin < count;) {
    int64_t end = begin;
    while (end < count && goes(states_[end])) states_[end++] = State::kAbsent;
    if (end > begin) advise(begin, end, MADV_DONTNEED);
    resident_ -= end - begin;
    begin = end + 1;
  }
}

// Ignores refusals, which only cost memory and time: pages then come when they are touched, or stay.
void Residency::advise(int64_t granule, int64_t end_granule, int advice) {
  const int64_t begin = granule * kGranule, end = std::min(end_granule * kGranule, bytes_);
  for (char* other : others_) {
    if (::madvise(other + begin, end - begin, advice) != 0 && errno == EINVAL && advice == kPopulate) {
      can_populate_ = false;
    }
  }
}

}  // namespace drivetrain::ddp
