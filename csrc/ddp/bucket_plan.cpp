// Packs gradients in their order and chooses where buckets close.
#include "ddp/bucket_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

int64_t bytes_of(const ParamSize& size) { return aligned(size.numel * size.element_bytes); }

// One group's bucket that still takes parameters.
struct OpenBucket {
  BucketPlan plan;
  size_t closed = 0;          // how many buckets of this group came before
  int64_t last_position = 0;  // position of its last parameter in the order
};

// Closes a group's bucket where is_full(bucket) holds after a parameter, and all buckets where closes_all(position)
// holds. The rest of each group is a bucket as well.
template <class IsFull, class ClosesAll>
std::vector<BucketPlan> pack(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order, IsFull&& is_full,
                             ClosesAll&& closes_all) {
  std::map<int64_t, OpenBucket> open;
  std::vector<std::pair<int64_t, BucketPlan>> done;  // with the position at which the bucket is complete
  const auto close = [&](OpenBucket& bucket) {
    if (bucket.plan.entries.empty()) return;
    done.emplace_back(bucket.last_position, std::move(bucket.plan));
    bucket.plan = BucketPlan();
    ++bucket.closed;
  };
  const auto close_all = [&] {
    for (auto& [group, bucket] : open) close(bucket);
  };

  for (int64_t position = 0; position < static_cast<int64_t>(order.size()); ++position) {
    const ParamSize& size = sizes.at(order[position]);
    OpenBucket& bucket = open[size.group];
    bucket.plan.group = size.group;
    bucket.plan.entries.push_back({order[position], bucket.plan.bytes});
    bucket.plan.bytes += bytes_of(size);
    bucket.last_position = position;
    if (is_full(bucket)) close(bucket);
    if (closes_all(position)) close_all();
  }
  close_all();

  std::sort(done.begin(), done.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<BucketPlan> buckets;
  for (auto& [position, plan] : done) buckets.push_back(std::move(plan));
  return buckets;
}

// Returns when an all-reduce ends that may begin at `ready`. The one before it may begin at `ready_before` and ends at
// `end_before`.
double end_of(double ready_before, double end_before, double ready, double seconds, bool in_background) {
  const double start = in_background ? std::max(ready, end_before) : end_before + (ready - ready_before);
  return start + seconds;
}

// Neighbors in the order that stay in one bucket.
struct Piece {
  int64_t last_position = 0;
  double ready = 0;                        // with all pieces before it
  std::map<int64_t, int64_t> bytes_up_to;  // per group, from the first piece to the end of this one
};

std::vector<Piece> pieces_of(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                             const std::vector<double>& ready) {
  int64_t total = 0;
  for (const ParamSize& size : sizes) total += bytes_of(size);
  const int64_t few = order.size() <= kMaxPieces ? 1 : static_cast<int64_t>(total / kMaxPieces) + 1;
  std::vector<Piece> pieces;
  Piece open;
  for (const ParamSize& size : sizes) open.bytes_up_to[size.group] = 0;
  int64_t open_bytes = 0;
  for (int64_t position = 0; position < static_cast<int64_t>(order.size()); ++position) {
    const ParamSize& size = sizes.at(order[position]);
    open.last_position = position;
    open.ready = std::max(open.ready, ready.at(order[position]));
    open.bytes_up_to[size.group] += bytes_of(size);
    open_bytes += bytes_of(size);
    if (open_bytes < few) continue;
    pieces.push_back(open);
    open_bytes = 0;
  }
  if (pieces.empty()) return {open};
  pieces.back() = open_bytes == 0 ? open : pieces.back();  // parameters without elements at the end
  if (open_bytes > 0) pieces.push_back(open);
  return pieces;
}

}  // namespace

// Closes a bucket with the gradient that fills it, as torch does. To close it before would leave each small parameter
// between two large ones in a bucket, and so in a collective, of its own.
std::vector<BucketPlan> plan_buckets(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                                     const std::vector<int64_t>& caps) {
  DT_INVARIANT(!caps.empty() && order.size() == sizes.size());
  const auto is_full = [&](const OpenBucket& bucket) {
    return bucket.plan.bytes >= caps[std::min(bucket.closed, caps.size() - 1)];
  };
  return pack(sizes, order, is_full, [](int64_t) { return false; });
}

double Costs::seconds(int64_t bytes) const {
  DT_INVARIANT(!points.empty());
  if (points.size() == 1) return points[0].seconds;
  size_t next = 1;
  while (next + 1 < points.size() && points[next].bytes < bytes) ++next;
  const Point &a = points[next - 1], &b = points[next];
  const double slope = (b.seconds - a.seconds) / static_cast<double>(b.bytes - a.bytes);
  return std::max(0.0, a.seconds + slope * static_cast<double>(bytes - a.bytes));
}

std::vector<ExpectedBucket> expect(const std::vector<BucketPlan>& buckets, const std::vector<double>& ready,
                                   const Costs& costs) {
  std::vector<ExpectedBucket> expected;
  ExpectedBucket before;
  for (const BucketPlan& bucket : buckets) {
    ExpectedBucket now;
    now.ready = before.ready;  // buckets start in their order
    for (const BucketEntry& entry : bucket.entries) now.ready = std::max(now.ready, ready.at(entry.param));
    const double seconds = costs.seconds(bucket.bytes);
    now.end = end_of(before.ready, before.end, now.ready, seconds, costs.in_background);
    now.start = now.end - seconds;
    expected.push_back(now);
    before = now;
  }
  return expected;
}

// Uses dynamic programming over the earliest end of the first j pieces, for every j. The first pass allows any number
// of cuts; later ones allow 1, 2, ... cuts until that end is reached. An earlier end of the pieces before never makes
// the end later.
std::vector<bool> choose_cuts(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                              const std::vector<double>& ready, const Costs& costs) {
  DT_INVARIANT(order.size() == sizes.size() && ready.size() == sizes.size() && !order.empty());
  const std::vector<Piece> pieces = pieces_of(sizes, order, ready);
  const size_t count = pieces.size();
  const auto ready_before = [&](size_t piece) { return piece == 0 ? 0.0 : pieces[piece - 1].ready; };
  // Seconds of the buckets that pieces [first, end) make, at [first * (count + 1) + end].
  std::vector<double> seconds((count + 1) * (count + 1), 0.0);
  for (size_t first = 0; first < count; ++first) {
    for (size_t end = first + 1; end <= count; ++end) {
      for (const auto& [group, up_to] : pieces[end - 1].bytes_up_to) {
        const int64_t bytes = up_to - (first == 0 ? 0 : pieces[first - 1].bytes_up_to.at(group));
        if (bytes > 0) seconds[first * (count + 1) + end] += costs.seconds(bytes);
      }
    }
  }
  const auto end_with = [&](size_t first, size_t end, double end_before) {
    return end_of(ready_before(first), end_before, pieces[end - 1].ready, seconds[first * (count + 1) + end],
                  costs.in_background);
  };

  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<double> least(count + 1, kNever);
  least[0] = 0;
  for (size_t end = 1; end <= count; ++end) {
    for (size_t first = 0; first < end; ++first) least[end] = std::min(least[end], end_with(first, end, least[first]));
  }

  constexpr double kRounding = 1e-9;  // of sums in another order
  const double goal = least[count] * (1 + kRounding);
  std::vector<double> ends(count + 1, kNever);
  ends[0] = 0;
  std::vector<std::vector<size_t>> firsts;  // [cuts][end]: first piece of the last bucket
  do {
    std::vector<double> longer(count + 1, kNever);
    firsts.emplace_back(count + 1, 0);
    for (size_t end = firsts.size(); end <= count; ++end) {
      for (size_t first = firsts.size() - 1; first < end; ++first) {
        const double candidate = end_with(first, end, ends[first]);
        if (candidate >= longer[end]) continue;
        longer[end] = candidate;
        firsts.back()[end] = first;
      }
    }
    ends = std::move(longer);
  } while (ends[count] > goal && firsts.size() < count);

  std::vector<bool> is_cut(order.size(), false);
  size_t end = count;
  for (size_t left = firsts.size(); left > 0; --left) {
    is_cut[pieces[end - 1].last_position] = true;
    end = firsts[left - 1][end];
  }
  return is_cut;
}

std::vector<BucketPlan> cut_buckets(const std::vector<ParamSize>& sizes, const std::vector<int64_t>& order,
                                    const std::vector<bool>& is_cut) {
  DT_INVARIANT(order.size() == sizes.size() && is_cut.size() == order.size());
  return pack(sizes, order, [](const OpenBucket&) { return false; }, [&](int64_t at) -> bool { return is_cut[at]; });
}

int64_t hash_of(const std::vector<BucketPlan>& buckets) {
  uint64_t hash = 0;
  const auto add =
      [&](int64_t value) {  // multiplying by an odd number is invertible, and the shift mixes high bits into low ones
        hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15;
        hash ^= hash >> 29;
      };
  for (const BucketPlan& bucket : buckets) {
    add(bucket.group);
    add(bucket.bytes);
    for (const BucketEntry& entry : bucket.entries) {
      add(entry.param);
      add(entry.offset);
    }
  }
  return static_cast<int64_t>(hash >> 11);
}

}  // namespace drivetrain::ddp
