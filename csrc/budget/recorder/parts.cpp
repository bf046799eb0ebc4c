// Cuts a profiled pass into parts; see parts.h.
#include "budget/recorder/parts.h"

#include <algorithm>
#include <utility>

namespace drivetrain::budget {

void Parts::note_save(int32_t value) {
  if (saved_.insert(value).second) saved_bytes_ += tape_.values[value].bytes;
}

void Parts::note_read(int32_t value, const at::Tensor& memory) {
  if (!is_of_earlier_part(tape_.values[value])) return;
  const auto held = held_for_.find(value);
  if (held != held_for_.end()) {
    held->second = begins_.size();
    return;
  }
  if (!store_.has(value) && is_near(value, begins_.size())) return;
  held_for_.emplace(value, begins_.size());
  store_.hold(value, memory);
  held_bytes_ += tape_.values[value].bytes;
}

void Parts::begin_op(int32_t op, int64_t read_bytes) {
  // A quarter less or more is enough to reach the end of a block, where few values are read.
  const bool reads_few = 16 * read_bytes <= part_bytes_;
  if (4 * saved_bytes_ < (reads_few ? 3 : 5) * part_bytes_) return;
  // A part is at least what one operation saves. To double a smaller one would merge the first parts into a large one.
  if (!std::exchange(has_parts_, true)) part_bytes_ = saved_bytes_;
  begins_.push_back(op);
  saved_.clear();
  saved_bytes_ = 0;
  // Values that were held later may have brought these near. A value is near to those before it.
  std::vector<std::pair<int32_t, size_t>> held(held_for_.begin(), held_for_.end());
  std::sort(held.begin(), held.end());
  for (const auto& [value, part] : held) {
    if (is_near(value, part)) let_go(value);
  }
  while (held_bytes_ > 2 * part_bytes_ && !begins_.empty()) merge();
}

// Returns whether a replay of the value, for an operation of that part, would make at most a quarter of a part from
// held values. If so, these are held for that part too.
bool Parts::is_near(int32_t value, size_t part) {
  int64_t bytes = 0;
  std::vector<int32_t> sources;
  std::unordered_set<int32_t> seen{value};
  std::vector<int32_t> todo{value};
  while (!todo.empty()) {
    const Value& next = tape_.values[todo.back()];
    todo.pop_back();
    bytes += next.bytes;
    if (4 * bytes > part_bytes_) return false;
    if (next.op < 0) continue;
    for (const int32_t read : tape_.ops[next.op].reads) {
      if (seen.insert(read).second) (store_.has(read) ? sources : todo).push_back(read);
    }
  }
  for (const int32_t source : sources) {
    const auto held = held_for_.find(source);
    if (held != held_for_.end()) held->second = std::max(held->second, part);
  }
  return true;
}

void Parts::keep(int32_t value) {
  if (held_for_.erase(value) != 0) held_bytes_ -= tape_.values[value].bytes;
}

void Parts::let_go(int32_t value) {
  keep(value);
  store_.let_go(value);
}

void Parts::merge() {
  if (begins_.size() % 2 == 1) saved_bytes_ += part_bytes_;  // the last part and the one before
  part_bytes_ *= 2;
  std::vector<int32_t> begins;
  for (size_t i = 1; i < begins_.size(); i += 2) begins.push_back(begins_[i]);
  begins_ = std::move(begins);
  std::vector<int32_t> inside;
  for (auto& [value, part] : held_for_) {
    part /= 2;
    if (part_of(tape_.values[value].op) == part) inside.push_back(value);
  }
  for (const int32_t value : inside) let_go(value);
}

size_t Parts::part_of(int32_t op) const {
  return std::upper_bound(begins_.begin(), begins_.end(), op) - begins_.begin();
}

}  // namespace drivetrain::budget
