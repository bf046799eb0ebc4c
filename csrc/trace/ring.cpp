// Implements the ring of timestamps as a bounded queue with one turn counter per slot.
#include "trace/ring.h"

namespace drivetrain::trace {

bool Ring::write(const Record& record, DeviceClock* clock) {
  uint64_t place = head_.load(std::memory_order_relaxed);
  while (true) {
    Slot& slot = slots_[place % kCapacity];
    const uint64_t free_turn = 2 * (place / kCapacity);
    const uint64_t turn = slot.turn.load(std::memory_order_acquire);
    if (turn == free_turn) {
      if (!head_.compare_exchange_weak(place, place + 1, std::memory_order_relaxed)) continue;
      slot.record = record;
      slot.record.is_marked = clock != nullptr && clock->mark(place % kCapacity);
      slot.turn.store(free_turn + 1, std::memory_order_release);
      return true;
    }
    if (turn < free_turn) {  // still holds the record of the lap before
      num_refused_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    place = head_.load(std::memory_order_relaxed);  // another writer has taken this place
  }
}

bool Ring::is_empty() const {
  return slots_[tail_ % kCapacity].turn.load(std::memory_order_acquire) != 2 * (tail_ / kCapacity) + 1;
}

std::optional<Record> Ring::read(DeviceClock* clock) {
  if (is_empty()) return std::nullopt;
  Slot& slot = slots_[tail_ % kCapacity];
  if (slot.record.is_marked && clock != nullptr) {
    const std::optional<int64_t> elapsed_ns = clock->elapsed_ns(tail_ % kCapacity);
    if (!elapsed_ns) return std::nullopt;
    slot.record.elapsed_ns = *elapsed_ns;
  }
  const Record record = slot.record;
  slot.turn.fetch_add(1, std::memory_order_release);
  ++tail_;
  return record;
}

}  // namespace drivetrain::trace
