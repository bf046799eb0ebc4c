// Declares the calls by which a library of collectives, such as NCCL, reduces or gathers ranges of ranks in place.
// Needs no torch header.
#pragma once

#include <cstdint>
#include <vector>

#include "ddp/transport/rank_ranges.h"

namespace drivetrain::ddp {

// One call for bytes [begin, end) of a tensor.
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
