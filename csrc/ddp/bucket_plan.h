// Declares the division of gradients into buckets: pure functions of sizes and times, with equal results on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace drivetrain::ddp {

// Every gradient starts on its own cache line, except in the buckets of communication hooks.
constexpr int64_t kAlignment = 64;

constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct ParamSize {
  int64_t numel;
  int64_t element_bytes;
  int64_t group;  // parameters of different groups (dtype, device) never share a bucket
};

struct BucketEntry {
  int64_t param;   // index into the sizes
  int64_t offset;  // bytes from the bucket's start
};

struct BucketPlan {
  std::vector<BucketEntry> entries;  // in the order in which gradients are expected
  int64_t bytes = 0;
  int64_t group = 0;
};

// Fills buckets in the given order, the expected order of gradients. Bucket i of a group closes when it has reached
// caps[i] bytes; the last cap repeats. Returns the buckets in the order in which they are expected to be complete.
std::vector<BucketPlan> plan_buckets(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                                     const std::vector<int64_t>& caps);

// The measured cost of all-reduces.
struct Costs {
  struct Point {
    int64_t bytes;
    double seconds;
  };
  std::vector<Point> points;  // measured; bytes rise, seconds do not fall
  // True if backward goes on meanwhile; else the ranks' own threads execute the all-reduces.
  bool in_background = true;

  // Interpolates, and extrapolates, linearly between the points.
  double seconds(int64_t bytes) const;
};

struct ExpectedBucket {
  double ready = 0;  // seconds from the first gradient to the last one, if backward never waits
  double start = 0;
  double end = 0;
};

// Returns the timeline of these buckets, with one all-reduce at a time in their order. ready: seconds at which each
// parameter's gradient comes, [parameters].
std::vector<ExpectedBucket> expect(const std::vector<BucketPlan>& buckets, const std::vector<double>& ready,
                                   const Costs& costs);

// Chooses where buckets close so that the last all-reduce ends earliest, with the fewest buckets for that. Returns for
// each position of the order if buckets close after it. The choice is optimal for one group of at most kMaxPieces
// parameters. If there are more, neighbors that together have less than 1 / kMaxPieces of the bytes stay together.
// Several groups close their buckets at the same positions.
constexpr size_t kMaxPieces = 512;
std::vector<bool> choose_cuts(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                              const std::vector<double>& ready, const Costs& costs);

// Returns the buckets that close there. It computes with integers only.
std::vector<BucketPlan> cut_buckets(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                                    const std::vector<bool>& is_cut);

// Returns a checksum below 2^53, so that a double represents it.
int64_t hash_of(const std::vector<BucketPlan>& buckets);

}  // namespace drivetrain::ddp
