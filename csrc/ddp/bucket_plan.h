// Which parameter goes to which bucket and where in the arena: pure functions of sizes and times, the same on every
// rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace drivetrain::ddp {

// Every gradient starts on its own cache line.
constexpr int64_t kAlignment = 64;

struct ParamSize {
  int64_t numel;
  int64_t element_bytes;
  int64_t group;  // parameters of different groups (dtype, device) never share a bucket
};

struct BucketEntry {
  int64_t param;   // index into the sizes
  int64_t offset;  // bytes from the bucket's start, a multiple of kAlignment
};

struct BucketPlan {
  std::vector<BucketEntry> entries;  // in the order in which gradients are expected
  int64_t bytes = 0;                 // a multiple of kAlignment
  int64_t group = 0;
};

// Fills buckets in the order given (the expected order of gradients). bucket i of a group closes when it has
// reached caps[i] bytes, the last cap repeating. Buckets come in the order in
// which they are expected to be complete.
std::vector<BucketPlan> plan_buckets(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                                     const std::vector<int64_t>& caps);

// What all-reduces cost.
struct Costs {
  struct Point {
    int64_t bytes;
    double seconds;
  };
  std::vector<Point> points;  // measured; bytes rise, seconds do not fall
  // Whether backward goes on meanwhile; else the ranks' own threads carry the all-reduces out.
  bool in_background = true;

  // Linear between the points and beyond them.
  double seconds(int64_t bytes) const;
};

struct ExpectedBucket {
  double ready = 0;  // seconds from the first gradient: the last gradient is there, if backward never stood still
  double start = 0;
  double end = 0;
};

// The timeline of these buckets: one all-reduce at a time, in their order. ready: of each parameter's gradient.
std::vector<ExpectedBucket> expect(const std::vector<BucketPlan>& buckets, const std::vector<double>& ready,
                                   const Costs& costs);

// Where buckets should close so that the last all-reduce ends earliest, with the fewest buckets for that: whether they
// do after each place of the order. Exact where all parameters are of one group and at most kMaxPieces; of more
// parameters, neighbours that together have less than 1 / kMaxPieces of the bytes stay together. With several groups,
// all close their buckets at the same places.
constexpr size_t kMaxPieces = 512;
std::vector<bool> choose_cuts(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                              const std::vector<double>& ready, const Costs& costs);

// The buckets that close there, of integers alone.
std::vector<BucketPlan> cut_buckets(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                                    const std::vector<bool>& is_cut);

// Equal for equal buckets, and hardly ever for others; below 2^53, so that a double holds it.
int64_t hash_of(const std::vector<BucketPlan>& buckets);

}  // namespace drivetrain::ddp
