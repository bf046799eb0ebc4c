// Stores, packs, offloads and restores the values of a tape; see value_store.h.
#include "budget/recorder/value_store.h"

#include <utility>

namespace drivetrain::budget {

using saved_tensors::Offloaded;
using saved_tensors::Packing;

bool ValueStore::has(int32_t index) const {
  const Value& value = tape_.values[index];
  return value.held.defined() || value.packed || value.offloaded;
}

void ValueStore::store(int32_t index, const at::Tensor& tensor) {
  Value& value = tape_.values[index];
  if (has(index)) return;
  // Code that the recorder does not see may still be writing the value, so only recorded values are converted.
  const bool is_complete =
      value.bytes % static_cast<int64_t>(tensor.itemsize()) == 0 && value.is_recorded && !value.is_uninitialized;
  if (value.format == kOnHost && tape_.shared->pool && is_complete) {
    value.offloaded.emplace(Offloaded::begin(tape_.shared->pool, bytes_of(tensor)));
    value.held_bytes = 0;
    return;
  }
  if (value.format >= kAsBits && value.format <= kAsInt8 && is_complete) {
    const Packing packing = packing_of(value.format);
    if (saved_tensors::is_packable(tensor.scalar_type(), packing)) {
      value.packed = saved_tensors::pack(flat_of(tensor, tensor.dtype()), packing);
    }
    if (value.packed) {
      value.held_bytes = value.packed->nbytes();
      count(value.held_bytes);
      return;
    }
  }
  hold(index, tensor);
}

void ValueStore::hold(int32_t index, const at::Tensor& tensor) {
  Value& value = tape_.values[index];
  if (value.held.defined()) return;
  value.held = alias_of(tensor);
  value.held_version = tensor._version();
  value.held_bytes = value.bytes;
  count(value.held_bytes);
}

void ValueStore::let_go(int32_t index) {
  Value& value = tape_.values[index];
  if (!has(index)) return;
  value.held.reset();
  value.packed.reset();
  value.offloaded.reset();
  count(-value.held_bytes);
  value.held_bytes = 0;
}

void ValueStore::count(int64_t bytes) {
  bytes_ += bytes;
  tape_.shared->tracker.add(bytes);
}

void ValueStore::let_go_all() {
  for (size_t value = 0; value < tape_.values.size(); ++value) let_go(static_cast<int32_t>(value));
}

void ValueStore::restore(int32_t index) {
  Value& value = tape_.values[index];
  const int64_t stored_bytes = value.held_bytes;
  value.is_recomputed = value.is_recomputed || value.packed || value.offloaded;
  if (value.packed) {
    hold(index, saved_tensors::unpack(*value.packed));
    value.packed.reset();
    count(-stored_bytes);
  } else if (value.offloaded) {
    count(-stored_bytes);  // not 0 if it was prefetched
    hold(index, value.offloaded->take());
    value.offloaded.reset();
  }
}

void ValueStore::await_copy_out(int32_t index) const {
  const std::optional<Offloaded>& offloaded = tape_.values[index].offloaded;
  if (offloaded) offloaded->await_copy_out();
}

void ValueStore::prefetch_at(int32_t index) {
  if (tape_.values[index].prefetches == nullptr) return;
  for (const auto& [op, write] : *tape_.values[index].prefetches) {
    const int32_t at = tape_.op_of_planned[op];
    if (at >= 0) prefetch(tape_.ops[at].writes[write].value);
  }
}

void ValueStore::prefetch(int32_t index) {
  Value& value = tape_.values[index];
  if (!value.offloaded || value.held_bytes > 0) return;
  if (tape_.shared->tracker.counts().live_bytes + value.bytes > tape_.shared->budget_bytes) return;
  value.offloaded->prefetch();
  value.held_bytes = value.bytes;
  count(value.held_bytes);
}

}  // namespace drivetrain::budget
