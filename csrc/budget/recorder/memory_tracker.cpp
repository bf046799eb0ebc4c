// Counts live and peak bytes of recorded passes; see memory_tracker.h.
#include "budget/recorder/memory_tracker.h"

#include <algorithm>
#include <utility>

#include "budget/recorder/recorded_pass.h"

namespace drivetrain::budget {

namespace {

using Lock = std::lock_guard<std::mutex>;

// Up to this many unhooked storages are searched at every new peak. Longer lists are searched only after the live bytes
// have grown by 1/256. Otherwise the total time would grow with the square of the number of operations.
constexpr size_t kFew = 4096;

}  // namespace

void MemoryTracker::add(int64_t bytes) {
  const Lock lock(mutex_);
  add_locked(bytes);
}

void MemoryTracker::add_locked(int64_t bytes) {
  live_bytes_ += bytes;
  if (live_bytes_ <= std::min(peak_bytes_, limit_bytes_)) return;
  const bool is_first_above = live_bytes_ > limit_bytes_ && exceeding_bytes_ == 0;
  if (unhooked_.size() <= kFew || live_bytes_ > next_check_bytes_ || is_first_above) forget_freed();
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
  if (live_bytes_ > limit_bytes_) exceeding_bytes_ = std::max(exceeding_bytes_, live_bytes_);
}

void MemoryTracker::add_unhooked(const Tape& tape, c10::weak_intrusive_ptr<c10::StorageImpl> storage, int64_t bytes) {
  const Lock lock(mutex_);
  unhooked_.push_back({&tape, std::move(storage), bytes});
  add_locked(bytes);
}

template <class Predicate>
void MemoryTracker::forget_if(const Predicate& is_over) {
  std::erase_if(unhooked_, [&](const Unhooked& kept) {
    if (!is_over(kept)) return false;
    live_bytes_ -= kept.bytes;
    return true;
  });
}

void MemoryTracker::forget_freed() {
  forget_if([](const Unhooked& kept) { return kept.storage.expired(); });
  next_check_bytes_ = live_bytes_ + live_bytes_ / 256;
}

void MemoryTracker::open(const std::shared_ptr<RecordedPass>& pass) {
  const Lock lock(mutex_);
  std::erase_if(passes_, [](const std::weak_ptr<RecordedPass>& other) { return other.expired(); });
  passes_.push_back(pass);
}

void MemoryTracker::close(const Tape& tape) {
  const Lock lock(mutex_);
  forget_if([&tape](const Unhooked& kept) { return kept.tape == &tape; });
}

std::vector<std::shared_ptr<RecordedPass>> MemoryTracker::passes() const {
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<RecordedPass>> open;
  for (const std::weak_ptr<RecordedPass>& pass : passes_) {
    if (auto alive = pass.lock()) open.push_back(std::move(alive));
  }
  return open;
}

int64_t MemoryTracker::live_bytes() {
  const Lock lock(mutex_);
  forget_freed();
  return live_bytes_;
}

int64_t MemoryTracker::peak_bytes() const {
  const Lock lock(mutex_);
  return peak_bytes_;
}

void MemoryTracker::set_limit(int64_t bytes) {
  const Lock lock(mutex_);
  limit_bytes_ = bytes;
}

void MemoryTracker::begin_step() {
  const Lock lock(mutex_);
  exceeding_bytes_ = 0;
}

int64_t MemoryTracker::exceeding_bytes() const {
  const Lock lock(mutex_);
  return exceeding_bytes_;
}

void MemoryTracker::reset() {
  const Lock lock(mutex_);
  forget_freed();
  peak_bytes_ = live_bytes_;
  num_replayed_ = 0;
  replay_seconds_ = 0;
}

void MemoryTracker::count_replay(double seconds) {
  const Lock lock(mutex_);
  replay_seconds_ += seconds;
  ++num_replayed_;
}

int64_t MemoryTracker::num_replayed() const {
  const Lock lock(mutex_);
  return num_replayed_;
}

double MemoryTracker::replay_seconds() const {
  const Lock lock(mutex_);
  return replay_seconds_;
}

int64_t MemoryTracker::num_uses() const {
  const Lock lock(mutex_);
  return num_uses_;
}

int64_t MemoryTracker::next_use() {
  const Lock lock(mutex_);
  return num_uses_++;
}

}  // namespace drivetrain::budget
