// Implements the ranges of ranks under other numbers.
#include "ddp/transport/renumbered_ranges.h"

#include <algorithm>
#include <utility>

namespace drivetrain::ddp {

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
