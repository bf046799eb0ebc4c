// Which parameter goes to which bucket and where in the arena: a pure function of sizes, the same on every rank.
#pragma once

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

struct Slot {
  int64_t param;   // index into the sizes
  int64_t offset;  // bytes from the bucket's start, a multiple of kAlignment
};

struct BucketPlan {
  std::vector<Slot> slots;  // in the order in which gradients are expected
  int64_t bytes = 0;        // a multiple of kAlignment
  int64_t group = 0;
};

// Fills buckets in the order given (the expected order of gradients). bucket i of a group closes when it has
// reached caps[i] bytes, the last cap repeating. Buckets come in the order in
// which they are expected to be complete.
std::vector<BucketPlan> plan_buckets(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                                     const std::vector<int64_t>& caps);

}  // namespace drivetrain::ddp
