// Counting what is kept alive for backward; see memory_tracker.h.
#include "budget/recorder/memory_tracker.h"

#include <algorithm>
#include <utility>

namespace drivetrain::budget {

namespace {

using Lock = std::lock_guard<std::mutex>;

// So many are looked at whenever there may be a new peak. More of them when it has grown by a 256th since the last
// time, or a pass would take the square of its length.
constexpr size_t kFew = 4096;

}  // namespace

void Ledger::add(int64_t bytes) {
  const Lock lock(mutex_);
  add_locked(bytes);
}

void Ledger::add_locked(int64_t bytes) {
  live_bytes_ += bytes;
  if (live_bytes_ <= peak_bytes_) return;
  if (unhooked_.size() <= kFew || live_bytes_ > next_look_) forget_freed();
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
}

void Ledger::add_unhooked(const Tape* of, c10::weak_intrusive_ptr<c10::StorageImpl> storage, int64_t bytes) {
  const Lock lock(mutex_);
  unhooked_.push_back({of, std::move(storage), bytes});
  add_locked(bytes);
}

template <class Predicate>
void Ledger::forget_if(const Predicate& is_over) {
  std::erase_if(unhooked_, [&](const Unhooked& kept) {
    if (!is_over(kept)) return false;
    live_bytes_ -= kept.bytes;
    return true;
  });
}

void Ledger::forget_freed() {
  forget_if([](const Unhooked& kept) { return kept.storage.expired(); });
  next_look_ = live_bytes_ + live_bytes_ / 256;
}

void Ledger::open(const std::shared_ptr<Tape>& tape) {
  const Lock lock(mutex_);
  std::erase_if(tapes_, [](const std::weak_ptr<Tape>& other) { return other.expired(); });
  tapes_.push_back(tape);
}

void Ledger::close(const Tape* tape) {
  const Lock lock(mutex_);
  forget_if([tape](const Unhooked& kept) { return kept.of == tape; });
}

std::vector<std::shared_ptr<Tape>> Ledger::tapes() const {
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<Tape>> open;
  for (const std::weak_ptr<Tape>& tape : tapes_) {
    if (auto alive = tape.lock()) open.push_back(std::move(alive));
  }
  return open;
}

int64_t Ledger::live_bytes() {
  const Lock lock(mutex_);
  forget_freed();
  return live_bytes_;
}

int64_t Ledger::peak_bytes() const {
  const Lock lock(mutex_);
  return peak_bytes_;
}

void Ledger::reset() {
  const Lock lock(mutex_);
  forget_freed();
  peak_bytes_ = live_bytes_;
  num_replayed_ = 0;
  replay_seconds_ = 0;
}

void Ledger::note_replay(double seconds) {
  const Lock lock(mutex_);
  replay_seconds_ += seconds;
  ++num_replayed_;
}

int64_t Ledger::num_replayed() const {
  const Lock lock(mutex_);
  return num_replayed_;
}

double Ledger::replay_seconds() const {
  const Lock lock(mutex_);
  return replay_seconds_;
}

int64_t Ledger::num_uses() const {
  const Lock lock(mutex_);
  return num_uses_;
}

int64_t Ledger::next_use() {
  const Lock lock(mutex_);
  return num_uses_++;
}

}  // namespace drivetrain::budget
