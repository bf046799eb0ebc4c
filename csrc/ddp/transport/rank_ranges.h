// Declares which bytes of a tensor belong to which rank, for collectives that leave each rank its own part. Needs no
// torch header.
#pragma once

#include <cstdint>
#include <vector>

namespace drivetrain::ddp {

// Bytes [begin, end) of a tensor that belong to one rank of the group.
struct RankRange {
  int64_t begin;
  int64_t end;
  int rank;
  std::vector<int> also = {};  // further ranks that a reduce-scatter brings the result to
};

// In ascending order, without overlap and with whole elements. Bytes in none of them belong to all ranks alike: a
// reduce-scatter reduces them on every rank, and a gather leaves them alone.
using RankRanges = std::vector<RankRange>;

}  // namespace drivetrain::ddp
