// Finds races: two accesses to one byte, at least one of them a write, that no stream order, event or host wait puts in
// order.
#include <cstdio>

#include "core.h"

namespace fake_cuda {

namespace {

using Access = std::shared_ptr<const OpInfo>;

struct Cell {
  uintptr_t end = 0;
  Access writer;
  std::vector<Access> readers;  // since the last write
};

struct Shadow {
  std::mutex mutex;
  std::map<uintptr_t, Cell> cells;  // keyed by their first byte, without overlaps
};
Shadow& shadow() {
  static auto* made = new Shadow;
  return *made;
}

bool is_before(const Access& access, const Op& op) {
  return access == nullptr || op.clock.of(access->stream_id) >= access->number;
}

// Splits the cell around `at`, if there is one, so that a cell begins there.
void split(std::map<uintptr_t, Cell>& cells, uintptr_t at) {
  auto after = cells.upper_bound(at);
  if (after == cells.begin()) return;
  --after;
  if (after->first >= at || after->second.end <= at) return;
  Cell rest = after->second;
  after->second.end = at;
  cells[at] = std::move(rest);
}

struct Found {
  uintptr_t address = 0;
  Access other;
  bool other_wrote = false;
};

Found visit(std::map<uintptr_t, Cell>& cells, const Op& op, uintptr_t begin, uintptr_t end, bool writes) {
  Found found;
  const auto note = [&](uintptr_t at, const Access& other, bool other_wrote) {
    if (found.other == nullptr) found = {at, other, other_wrote};
  };
  split(cells, begin);
  split(cells, end);
  for (auto cell = cells.lower_bound(begin); cell != cells.end() && cell->first < end; ++cell) {
    if (!is_before(cell->second.writer, op)) note(cell->first, cell->second.writer, true);
    if (!writes) continue;
    for (const Access& reader : cell->second.readers) {
      if (!is_before(reader, op)) note(cell->first, reader, false);
    }
  }
  if (writes) {
    cells.erase(cells.lower_bound(begin), cells.lower_bound(end));
    cells[begin] = {end, op.info, {}};
    return found;
  }
  for (uintptr_t at = begin; at < end;) {
    auto cell = cells.lower_bound(at);
    if (cell == cells.end() || cell->first > at) {  // no access recorded
      const uintptr_t until = cell == cells.end() ? end : std::min(end, cell->first);
      cells[at] = {until, nullptr, {op.info}};
      at = until;
      continue;
    }
    auto& readers = cell->second.readers;
    std::erase_if(readers, [&](const Access& reader) { return is_before(reader, op); });
    readers.push_back(op.info);
    if (!is_before(cell->second.writer, op)) cell->second.writer = nullptr;  // reports each race once
    at = cell->second.end;
  }
  return found;
}

}  // namespace

void check_access(const Op& op, uintptr_t address, size_t bytes, bool writes) {
  if (bytes == 0) return;
  const Place place = place_of(reinterpret_cast<void*>(address));
  if (place.kind == Kind::kPageable) return;
  if (place.kind == Kind::kDevice) (writes ? op.bytes_written : op.bytes_read) += bytes;
  if (!place.is_known) {
    report("memory that is not allocated",
           op.info->describe() + (writes ? " writes " : " reads ") + describe_address(address));
    return;
  }
  Found found;
  {
    const std::lock_guard<std::mutex> lock(shadow().mutex);
    found = visit(shadow().cells, op, address, address + bytes, writes);
  }
  if (found.other == nullptr) return;
  report("race", op.info->describe() + (writes ? " writes " : " reads ") + describe_address(found.address) +
                     ", which " + found.other->describe() + (found.other_wrote ? " writes" : " reads") +
                     ": nothing orders the two");
}

void forget_accesses(uintptr_t address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(shadow().mutex);
  auto& cells = shadow().cells;
  split(cells, address);
  split(cells, address + bytes);
  cells.erase(cells.lower_bound(address), cells.lower_bound(address + bytes));
}

std::string last_writer(uintptr_t address) {
  const std::unique_lock<std::mutex> lock(shadow().mutex, std::try_to_lock);
  if (!lock) return "";
  auto& cells = shadow().cells;
  auto after = cells.upper_bound(address);
  if (after == cells.begin()) return "";
  --after;
  return after->second.end > address && after->second.writer ? after->second.writer->describe() : "";
}

}  // namespace fake_cuda

FAKE_CUDA_API void fake_cuda_check(const void* address, size_t bytes, int writes) {
  if (!fake_cuda::running()) return;
  fake_cuda::check_access(*fake_cuda::running(), reinterpret_cast<uintptr_t>(address), bytes, writes != 0);
}
