// Cuts where few bytes cross, solves equal segments once, and combines segments by dynamic programming.
#include "budget/solver/segments.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/hash.h"
#include "budget/solver/min_cut.h"
#include "budget/solver/simulator.h"

namespace drivetrain::budget {
namespace {

constexpr size_t kMaxCuts = 320;
constexpr size_t kMaxOnHull = 20;       // policies of a segment on the lower hull
constexpr size_t kMaxEnumerated = 256;  // policies of a segment, where all are tried
constexpr int64_t kMaxWork = 30'000;    // operations in all different segments
constexpr size_t kNumLevels = 400;      // into which saved bytes are rounded
constexpr double kInfiniteSeconds = std::numeric_limits<double>::infinity();
constexpr int64_t kNotReached = std::numeric_limits<int64_t>::max();

// Returns the positions at which no more bytes cross than at both neighbors. Then drops the flattest valleys until at
// most kMaxCuts are left. Equal valleys are kept or dropped together, so that repeated blocks are cut alike.
std::vector<int32_t> valleys(const std::vector<int64_t>& bytes, const std::vector<uint8_t>& is_possible) {
  std::vector<int32_t> found;
  for (int32_t at = 1; at + 1 < static_cast<int32_t>(is_possible.size()); ++at) {
    if (is_possible[at]) found.push_back(at);
  }
  const auto keep_low = [&](double most_above_neighbors) {
    std::vector<int32_t> left;
    for (size_t i = 0; i < found.size(); ++i) {
      const int64_t here = bytes[found[i]];
      const int64_t before = i > 0 ? bytes[found[i - 1]] : here,
                    after = i + 1 < found.size() ? bytes[found[i + 1]] : here;
      const double above = static_cast<double>(here + 1) / static_cast<double>(std::min(before, after) + 1);
      if (above <= most_above_neighbors) left.push_back(found[i]);
    }
    found = std::move(left);
  };
  keep_low(1);
  for (double limit : {16.0, 4.0, 2.0, 1.5, 1.2, 1.1, 1.05, 1.02, 1.0}) {
    if (found.size() > kMaxCuts) keep_low(limit);
  }
  while (found.size() > kMaxCuts) {
    std::vector<int32_t> left;
    for (size_t i = 1; i < found.size(); i += 2) left.push_back(found[i]);
    found = std::move(left);
  }
  return found;
}

// Returns every policy, or none where there are more than kMaxEnumerated. Other entries are as in `one`.
std::vector<Policy> all_policies(const TraceIndex& index, const Policy& one) {
  std::vector<int32_t> decided;
  for (int32_t op = index.num_ops() - 1; op >= 0; --op) {
    for (int32_t value : index.writes[op]) {
      if (!index.may_be_needed[value] || !index.can_recompute[value]) continue;
      if (index.trace.values[value].can_save) decided.push_back(value);
    }
  }
  std::vector<Policy> policies = {one};
  for (int32_t value : decided) {
    const size_t count = policies.size(), num_entries = index.trace.values[value].formats.size() + 2;
    if (count * num_entries > kMaxEnumerated) return {};
    for (size_t entry = 0; entry < num_entries; ++entry) {
      for (size_t i = 0; i < count; ++i) {
        Policy& next = entry == 0 ? policies[i] : policies.emplace_back(policies[i]);
        next[value] = static_cast<int8_t>(static_cast<int>(entry) - 1);
      }
    }
  }
  return policies;
}

}  // namespace

// Identifies equal segments by a hash of everything but their seconds, which are measured and vary.
struct Segments::Signature {
  uint64_t hash = 0xcbf29ce484222325;
  size_t num_values = 0;
  double seconds = 0;

  bool matches(const Signature& other) const {
    constexpr double kNoise = 0.3;
    return num_values == other.num_values && std::abs(seconds - other.seconds) <= kNoise * seconds;
  }

  void add(int64_t number) { hash = mix(hash, static_cast<uint64_t>(number)); }
};

Segments::Segments(const TraceIndex& index) : index_(index) {
  find_last_readers();
  find_cuts();
  find_frontiers();
}

void Segments::find_last_readers() {
  last_reader_.assign(index_.num_values(), -1);
  for (int32_t op = 0; op < index_.num_ops(); ++op) {
    if (!index_.may_be_replayed[op]) continue;
    for (int32_t value : index_.reads[op]) last_reader_[value] = op;
  }
  std::vector<std::vector<int32_t>> uses(index_.num_values());
  for (int32_t use = 0; use < index_.num_uses(); ++use) uses[index_.trace.uses[use].value].push_back(use);
  for (const std::vector<int32_t>& of_value : uses) {
    for (int32_t use : of_value) uses_of_value_.add(use);
    uses_of_value_.end_list();
  }
}

void Segments::find_cuts() {
  const int32_t count = index_.num_ops();
  std::vector<int64_t> bytes(count + 1, 0);
  std::vector<int32_t> num_unsaved(count + 1, 0);
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (index_.is_external(value) || last_reader_[value] < 0) continue;
    const TraceValue& crossing = index_.trace.values[value];
    const int32_t first = index_.writer[value] + 1, end = last_reader_[value] + 1;
    bytes[first] += crossing.bytes;
    if (end <= count) bytes[end] -= crossing.bytes;
    if (crossing.can_save) continue;
    ++num_unsaved[first];
    if (end <= count) --num_unsaved[end];
  }
  std::vector<uint8_t> is_possible(count + 1, 0);
  for (int32_t at = 0; at <= count; ++at) {
    if (at > 0) {
      bytes[at] += bytes[at - 1];
      num_unsaved[at] += num_unsaved[at - 1];
    }
    is_possible[at] = num_unsaved[at] == 0;
  }
  cuts_ = {0};
  for (int32_t cut : valleys(bytes, is_possible)) cuts_.push_back(cut);
  cuts_.push_back(count);
}

Segments::Signature Segments::signature_of(int32_t first_op, int32_t end_op) const {
  const Trace& trace = index_.trace;
  Signature signature;
  for (int32_t op = first_op; op < end_op; ++op) {
    signature.seconds += trace.ops[op].seconds;
    signature.add(-1);
    for (int32_t value : index_.reads[op]) {
      const int32_t writer = index_.writer[value];
      if (writer < first_op) continue;
      int32_t slot = 0;
      for (int32_t written : index_.writes[writer]) {
        if (written == value) break;
        ++slot;
      }
      signature.add(op - writer);
      signature.add(slot);
    }
    signature.add(-2);
    signature.num_values += index_.writes[op].size();
    for (int32_t value : index_.writes[op]) {
      const TraceValue& written = trace.values[value];
      signature.add(written.bytes);
      signature.add(written.can_save + 2 * index_.can_recompute[value] + 4 * index_.takes_over[value] +
                    8 * is_crossing(value, end_op));
      for (const FormatPrice& format : written.formats) signature.add(format.bytes);
      signature.add(index_.num_releases[value]);
      signature.add(index_.is_taken[value]);
    }
  }
  return signature;
}

Trace Segments::trace_of(int32_t first_op, int32_t end_op) const {
  const Trace& trace = index_.trace;
  Trace segment;
  std::vector<std::pair<int32_t, int32_t>> uses;  // the use, and the value's index in the segment
  std::unordered_map<int32_t, int32_t> local;
  for (int32_t op = first_op; op < end_op; ++op) {
    TraceOp& copy = segment.ops.emplace_back();
    copy.seconds = trace.ops[op].seconds;
    for (int32_t value : index_.reads[op]) {
      if (index_.writer[value] >= first_op) copy.reads.push_back(local.at(value));
    }
    for (int32_t value : index_.writes[op]) {
      const auto index = static_cast<int32_t>(segment.values.size());
      local[value] = index;
      copy.writes.push_back(index);
      TraceValue& written = segment.values.emplace_back(trace.values[value]);
      const bool is_inside = written.replaces >= 0 && index_.writer[written.replaces] >= first_op;
      written.replaces = is_inside ? local.at(written.replaces) : -1;
      written.can_recompute = index_.can_recompute[value];
      for (int32_t use : uses_of_value_[value]) uses.emplace_back(use, index);
      if (!is_crossing(value, end_op)) continue;
      written.can_recompute = false;
      segment.uses.push_back({index, true});  // released first: later segments need it until backward is here
    }
  }
  std::sort(uses.begin(), uses.end());
  for (const auto& [use, value] : uses) segment.uses.push_back({value, trace.uses[use].is_release});
  return segment;
}

// Finds points of the lower hull of bytes and seconds by minimum cuts, in the widest gap first. Where policies are few,
// adds all of them.
Segments::Frontier Segments::frontier_of(const Trace& segment) const {
  const TraceIndex index(segment);
  MinCut cut(index);
  Simulator simulator(index);
  double all_seconds = 0;
  for (const TraceOp& op : segment.ops) all_seconds += op.seconds;
  std::vector<PricedPolicy> hull = {cut.at(0), cut.at(all_seconds + 1)};  // from the most bytes to the least
  std::vector<uint8_t> is_closed = {0};  // no other point is between this one and the next
  while (hull.size() < kMaxOnHull) {
    size_t widest = hull.size();
    double most = 0;
    const double scale = (hull.back().seconds - hull[0].seconds) / std::max(1.0, hull[0].bytes - hull.back().bytes);
    for (size_t i = 0; i + 1 < hull.size(); ++i) {
      const double bytes = hull[i].bytes - hull[i + 1].bytes, seconds = hull[i + 1].seconds - hull[i].seconds;
      if (is_closed[i] || bytes <= 0) continue;
      const double gap = bytes * scale + seconds;
      if (gap <= most) continue;
      most = gap;
      widest = i;
    }
    if (widest == hull.size()) break;
    const PricedPolicy &high = hull[widest], &low = hull[widest + 1];
    const double price = std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes));
    PricedPolicy between = cut.at(price);
    const double on_line = high.seconds + price * high.bytes;
    if (between.seconds + price * between.bytes >= on_line * (1 - 1e-9) || between.bytes >= high.bytes ||
        between.bytes <= low.bytes) {
      is_closed[widest] = 1;
      continue;
    }
    hull.insert(hull.begin() + static_cast<std::ptrdiff_t>(widest) + 1, std::move(between));
    is_closed.insert(is_closed.begin() + static_cast<std::ptrdiff_t>(widest), 0);
  }
  Frontier frontier;
  const auto add = [&](const Policy& policy) {
    const Outcome outcome = simulator.run(policy);
    const SegmentPolicy added{outcome.forward_bytes, outcome.peak_bytes, outcome.seconds, policy};
    const auto is_no_worse = [](const SegmentPolicy& a, const SegmentPolicy& b) {
      return a.saved_bytes <= b.saved_bytes && a.peak_bytes <= b.peak_bytes && a.seconds <= b.seconds;
    };
    const auto is_as_good = [&](const SegmentPolicy& other) { return is_no_worse(other, added); };
    if (std::any_of(frontier.begin(), frontier.end(), is_as_good)) return;
    std::erase_if(frontier, [&](const SegmentPolicy& other) { return is_no_worse(added, other); });
    frontier.push_back(added);
  };
  for (const PricedPolicy& point : hull) add(point.policy);
  for (const Policy& policy : all_policies(index, hull[0].policy)) add(policy);
  return frontier;
}

void Segments::find_frontiers() {
  struct Known {
    Signature signature;
    size_t frontier;
  };
  std::unordered_map<uint64_t, std::vector<Known>> known;
  segments_.resize(cuts_.size());
  int64_t work = 0;
  for (size_t length = 1; length < cuts_.size() && work < kMaxWork; length += 1 + length / 16) {
    for (size_t first = 0; first + length < cuts_.size(); ++first) {
      const int32_t first_op = cuts_[first], end_op = cuts_[first + length];
      const Signature signature = signature_of(first_op, end_op);
      std::vector<Known>& alike = known[signature.hash];
      auto same =
          std::find_if(alike.begin(), alike.end(), [&](const Known& it) { return it.signature.matches(signature); });
      if (same == alike.end()) {
        alike.push_back({signature, frontiers_.size()});
        same = alike.end() - 1;
        frontiers_.push_back(frontier_of(trace_of(first_op, end_op)));
        work += end_op - first_op;
      }
      segments_[first + length].push_back({first, same->frontier});
    }
  }
}

void Segments::apply(const Part& part, size_t end_cut, Policy& policy) const {
  size_t at = 0;
  for (int32_t op = cuts_[part.first_cut]; op < cuts_[end_cut]; ++op) {
    for (int32_t value : index_.writes[op]) policy[value] = part.chosen->policy[at++];
  }
}

// Ignores seconds, so fewer saved bytes are always better and one state per cut is enough.
std::optional<Policy> Segments::smallest_within(int64_t budget_bytes) const {
  std::vector<int64_t> saved(cuts_.size(), kNotReached);
  std::vector<Part> parts(cuts_.size());
  saved[0] = 0;
  for (size_t end = 1; end < cuts_.size(); ++end) {
    for (const Segment& segment : segments_[end]) {
      const int64_t before = saved[segment.first_cut];
      if (before == kNotReached) continue;
      for (const SegmentPolicy& chosen : frontiers_[segment.frontier]) {
        if (before + chosen.peak_bytes > budget_bytes || before + chosen.saved_bytes >= saved[end]) continue;
        saved[end] = before + chosen.saved_bytes;
        parts[end] = {segment.first_cut, &chosen};
      }
    }
  }
  if (saved.back() == kNotReached) return std::nullopt;
  Policy policy(index_.num_values(), kRecompute);
  for (size_t end = cuts_.size() - 1; end > 0; end = parts[end].first_cut) apply(parts[end], end, policy);
  return policy;
}

Policy Segments::smallest() const {
  int64_t low = 0, high = 1;
  for (const TraceValue& value : index_.trace.values) high += 2 * value.bytes;
  std::optional<Policy> smallest = smallest_within(high);
  DT_INVARIANT(smallest.has_value());
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    std::optional<Policy> smaller = smallest_within(middle);
    (smaller ? high : low) = middle;
    if (smaller) smallest = std::move(smaller);
  }
  return *smallest;
}

std::optional<Policy> Segments::best(int64_t budget_bytes) const {
  // The least seconds up to a cut with about `saved_bytes`, and the combination that takes them.
  struct State {
    int64_t saved_bytes = 0;
    double seconds = kInfiniteSeconds;
    Part last;
    size_t before = 0;
  };
  const size_t count = cuts_.size();
  const double levels_per_byte = kNumLevels / static_cast<double>(budget_bytes);
  std::vector<std::vector<State>> states(count);
  states[0].push_back({0, 0, {}, 0});
  std::vector<State> levels(kNumLevels + 1);
  for (size_t end = 1; end < count; ++end) {
    std::fill(levels.begin(), levels.end(), State());
    for (const Segment& segment : segments_[end]) {
      const std::vector<State>& before = states[segment.first_cut];
      for (const SegmentPolicy& chosen : frontiers_[segment.frontier]) {
        for (size_t state = 0; state < before.size(); ++state) {
          if (before[state].saved_bytes + chosen.peak_bytes > budget_bytes) break;
          const int64_t saved = before[state].saved_bytes + chosen.saved_bytes;
          State& level = levels[static_cast<size_t>(static_cast<double>(saved) * levels_per_byte)];
          const double seconds = before[state].seconds + chosen.seconds;
          if (seconds >= level.seconds) continue;
          level = {saved, seconds, {segment.first_cut, &chosen}, state};
        }
      }
    }
    double least = kInfiniteSeconds;
    for (const State& level : levels) {
      if (level.seconds >= least) continue;
      least = level.seconds;
      states[end].push_back(level);
    }
  }
  if (states.back().empty()) return std::nullopt;
  Policy policy(index_.num_values(), kRecompute);
  size_t state = states.back().size() - 1;
  for (size_t end = count - 1; end > 0;) {
    const State& reached = states[end][state];
    apply(reached.last, end, policy);
    state = reached.before;
    end = reached.last.first_cut;
  }
  return policy;
}

}  // namespace drivetrain::budget
