// Declares ranges of ranks under other numbers, such as their hosts' numbers. Needs no torch header.
#pragma once

#include <vector>

#include "ddp/transport/rank_ranges.h"

namespace drivetrain::ddp {

// Returns the ranges with other numbers of ranks, and one range for neighbors that belong to the same. numbers: by
// rank; ranks with equal numbers become one.
RankRanges renumbered(const RankRanges& ranges, const std::vector<int>& numbers);

}  // namespace drivetrain::ddp
