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

// Returns the ranges with other numbers of ranks, and one range for neighbors that belong to the same. numbers: by
// rank; ranks with equal numbers become one.
RankRanges renumbered(const RankRanges& ranges, const std::vector<int>& numbers);

// One call of a library of collectives, such as NCCL, for bytes [begin, end) of a tensor.
struct RangeCall {
  enum class Kind {
    kEachRank,  // equal parts, one behind another in the order of ranks: a reduce-scatter or an all-gather
    kOneRank,   // a part of one rank: a reduction to it, or a broadcast from it
    kAllRanks,  // belongs to all ranks alike: an all-reduce
  };
  Kind kind;
  int64_t begin;
  int64_t end;
  int rank = 0;  // of kOneRank
};

// The alignment of values outside all ranges. A shorter gap between ranges is padding, whose values no rank needs.
constexpr int64_t kGapAlignment = 64;  // bytes

// Returns the calls that bring each rank the sums of its ranges, and all ranks the sums of the gaps. Returns nothing
// where one all-reduce is better: values go to further ranks, or there are many small calls.
std::vector<RangeCall> scatter_calls(const RankRanges& ranges, int64_t bytes, int size);

// Returns the calls that bring every rank the values of all ranges.
std::vector<RangeCall> gather_calls(const RankRanges& ranges, int size);

}  // namespace drivetrain::ddp
