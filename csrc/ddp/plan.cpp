// Greedy packing in gradient order: a bucket closes with the gradient that fills it, as torch's do. (Closing before it
// would leave each small parameter between two large ones in a bucket, and so in a collective, of its own.)
#include "ddp/plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// One group's bucket that still takes parameters.
struct OpenBucket {
  BucketPlan plan;
  size_t closed = 0;          // how many buckets of this group came before
  int64_t last_position = 0;  // where in the order its last parameter stands
};

}  // namespace

std::vector<BucketPlan> plan_buckets(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                                     const std::vector<int64_t>& caps) {
  DT_INVARIANT(!caps.empty() && order.size() == sizes.size());
  std::map<int64_t, OpenBucket> open;
  std::vector<std::pair<int64_t, BucketPlan>> done;  // with the position at which the bucket is complete
  const auto close = [&](OpenBucket& bucket) {
    if (bucket.plan.slots.empty()) return;
    done.emplace_back(bucket.last_position, std::move(bucket.plan));
    bucket.plan = BucketPlan();
    ++bucket.closed;
  };

  for (int64_t position = 0; position < static_cast<int64_t>(order.size()); ++position) {
    const ParamSize& size = sizes.at(order[position]);
    const int64_t bytes = aligned(size.numel * size.element_bytes);
    OpenBucket& bucket = open[size.group];
    bucket.plan.group = size.group;
    bucket.plan.slots.push_back({order[position], bucket.plan.bytes});
    bucket.plan.bytes += bytes;
    bucket.last_position = position;
    if (bucket.plan.bytes >= caps[std::min(bucket.closed, caps.size() - 1)]) close(bucket);
  }
  for (auto& [group, bucket] : open) close(bucket);

  std::sort(done.begin(), done.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<BucketPlan> buckets;
  for (auto& [position, plan] : done) buckets.push_back(std::move(plan));
  return buckets;
}

}  // namespace drivetrain::ddp
