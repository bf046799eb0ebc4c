// Renumbers ranges of ranks, and divides them into calls of collectives.
#include "ddp/transport/rank_ranges.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

// A call should move this much, as its start costs time whatever its size. The threshold is not tuned.
constexpr int64_t kBytesPerCall = 64 << 10;

// Returns true if the ranges from `first` on are equal parts of all ranks, one behind another in the order of ranks.
bool is_of_each_rank(const RankRanges& ranges, size_t first, int size) {
  if (first + size > ranges.size()) return false;
  const int64_t length = ranges[first].end - ranges[first].begin;
  for (int rank = 0; rank < size; ++rank) {
    const RankRange& range = ranges[first + rank];
    const int64_t begin = ranges[first].begin + rank * length;
    if (range.rank != rank || range.begin != begin || range.end != begin + length) return false;
  }
  return true;
}

}  // namespace

std::vector<RangeCall> gather_calls(const RankRanges& ranges, int size) {
  std::vector<RangeCall> calls;
  for (size_t i = 0; i < ranges.size();) {
    const RankRange& first = ranges[i];
    DT_INVARIANT(first.rank >= 0 && first.rank < size && first.begin <= first.end);
    if (first.begin == first.end) {  // rows without elements
      ++i;
    } else if (size > 1 && is_of_each_rank(ranges, i, size)) {
      calls.push_back({RangeCall::Kind::kEachRank, first.begin, ranges[i + size - 1].end});
      i += size;
    } else {
      calls.push_back({RangeCall::Kind::kOneRank, first.begin, first.end, first.rank});
      ++i;
    }
  }
  return calls;
}

std::vector<RangeCall> scatter_calls(const RankRanges& ranges, int64_t bytes, int size) {
  const auto goes_on = [](const RankRange& range) { return !range.also.empty(); };
  if (std::any_of(ranges.begin(), ranges.end(), goes_on)) return {};
  std::vector<RangeCall> calls;
  int64_t end = 0;
  const auto add_gap_before = [&](int64_t begin) {
    DT_INVARIANT(begin >= end);
    if (begin - end >= kGapAlignment) calls.push_back({RangeCall::Kind::kAllRanks, end, begin});
  };
  for (const RangeCall& call : gather_calls(ranges, size)) {
    add_gap_before(call.begin);
    calls.push_back(call);
    end = call.end;
  }
  add_gap_before(bytes);
  const bool are_small = static_cast<int64_t>(calls.size()) * kBytesPerCall > bytes && calls.size() > 1;
  return are_small ? std::vector<RangeCall>() : calls;
}

RankRanges renumbered(const RankRanges& ranges, const std::vector<int>& numbers) {
  RankRanges found;
  for (const RankRange& range : ranges) {
    RankRange next = {range.begin, range.end, numbers[range.rank]};
    for (const int rank : range.also) {
      const int number = numbers[rank];
      const bool is_known =
          number == next.rank || std::find(next.also.begin(), next.also.end(), number) != next.also.end();
      if (!is_known) next.also.push_back(number);
    }
    RankRange* const last = found.empty() ? nullptr : &found.back();
    if (last != nullptr && last->end == next.begin && last->rank == next.rank && last->also == next.also) {
      last->end = next.end;
    } else {
      found.push_back(std::move(next));
    }
  }
  return found;
}

}  // namespace drivetrain::ddp
