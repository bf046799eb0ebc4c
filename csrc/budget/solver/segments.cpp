// Cuts where few bytes cross, solves equal segments once, and combines segments by dynamic programming.
#include "budget/solver/segments.h"

#include <algorithm>
#include <bit>
#include <deque>
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
constexpr int kMaxOnHull = 20;          // policies of a segment from minimum cuts
constexpr size_t kMaxEnumerated = 256;  // policies of a segment, where all are tried
constexpr int64_t kMaxWork = 30'000;    // operations in all different segments
constexpr size_t kNumLevels = 400;      // into which saved bytes are rounded
constexpr double kInfiniteSeconds = std::numeric_limits<double>::infinity();

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
    for (int32_t value : index.trace.ops[op].writes) {
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

// Returns a hash of all that the policies of a segment depend on. Operations of one kind take equal seconds in a trace,
// so repeated blocks have equal hashes.
uint64_t Segments::hash_of(int32_t first_op, int32_t end_op) const {
  uint64_t hash = 0;
  const auto add = [&hash](int64_t number) { hash = mix(hash, static_cast<uint64_t>(number)); };
  for (int32_t op = first_op; op < end_op; ++op) {
    add(std::bit_cast<int64_t>(index_.trace.ops[op].seconds));
    for (int32_t value : index_.reads[op]) {
      const int32_t writer = index_.writer[value];
      if (writer < first_op) continue;
      add(op - writer);
      add(std::ranges::find(index_.trace.ops[writer].writes, value) - index_.trace.ops[writer].writes.begin());
    }
    add(-1);
    for (int32_t value : index_.trace.ops[op].writes) {
      const TraceValue& written = index_.trace.values[value];
      add(written.bytes);
      add(written.can_save + 2 * index_.can_recompute[value] + 4 * index_.takes_over[value] +
          8 * is_crossing(value, end_op) + 16 * index_.is_taken[value]);
      for (const FormatPrice& format : written.formats) add(format.bytes);
      add(index_.num_releases[value]);
    }
  }
  return hash;
}

Trace Segments::trace_of(int32_t first_op, int32_t end_op) const {
  const Trace& trace = index_.trace;
  Trace segment;
  std::unordered_map<int32_t, int32_t> local;
  for (int32_t op = first_op; op < end_op; ++op) {
    TraceOp& copy = segment.ops.emplace_back();
    copy.seconds = trace.ops[op].seconds;
    for (int32_t value : index_.reads[op]) {
      if (index_.writer[value] >= first_op) copy.reads.push_back(local.at(value));
    }
    for (int32_t value : index_.trace.ops[op].writes) {
      const auto index = static_cast<int32_t>(segment.values.size());
      local[value] = index;
      copy.writes.push_back(index);
      TraceValue& written = segment.values.emplace_back(trace.values[value]);
      const bool is_inside = written.replaces >= 0 && index_.writer[written.replaces] >= first_op;
      written.replaces = is_inside ? local.at(written.replaces) : -1;
      written.can_recompute = index_.can_recompute[value];
      if (!is_crossing(value, end_op)) continue;
      written.can_recompute = false;
      segment.uses.push_back({index, true});  // released first: later segments need it until backward is here
    }
  }
  for (const TraceUse& use : trace.uses) {
    const auto here = local.find(use.value);
    if (here != local.end()) segment.uses.push_back({here->second, use.is_release});
  }
  return segment;
}

// Tries policies of minimum cuts, each between two others. Where policies are few, tries all of them.
Segments::Frontier Segments::frontier_of(const Trace& segment) const {
  const TraceIndex index(segment);
  MinCut cut(index);
  Simulator simulator(index);
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
  double all_seconds = 0;
  for (const TraceOp& op : segment.ops) all_seconds += op.seconds;
  const PricedPolicy most = cut.at(0), least = cut.at(all_seconds + 1);
  add(most.policy);
  add(least.policy);
  std::deque<std::pair<PricedPolicy, PricedPolicy>> gaps = {{most, least}};
  for (int num_added = 2; num_added < kMaxOnHull && !gaps.empty(); gaps.pop_front()) {
    const auto& [high, low] = gaps.front();
    if (high.bytes <= low.bytes) continue;
    const PricedPolicy between = cut.at(price_between(high, low));
    if (between.bytes >= high.bytes || between.bytes <= low.bytes) continue;
    add(between.policy);
    ++num_added;
    gaps.emplace_back(high, between);
    gaps.emplace_back(between, low);
  }
  for (const Policy& policy : all_policies(index, most.policy)) add(policy);
  return frontier;
}

void Segments::find_frontiers() {
  std::unordered_map<uint64_t, size_t> known;
  segments_.resize(cuts_.size());
  int64_t work = 0;
  for (size_t length = 1; length < cuts_.size() && work < kMaxWork; length += 1 + length / 16) {
    for (size_t first = 0; first + length < cuts_.size(); ++first) {
      const int32_t first_op = cuts_[first], end_op = cuts_[first + length];
      const auto [frontier, is_new] = known.emplace(hash_of(first_op, end_op), frontiers_.size());
      if (is_new) {
        frontiers_.push_back(frontier_of(trace_of(first_op, end_op)));
        work += end_op - first_op;
      }
      segments_[first + length].push_back({first, frontier->second});
    }
  }
}

void Segments::apply(const Part& part, size_t end_cut, Policy& policy) const {
  size_t at = 0;
  for (int32_t op = cuts_[part.first_cut]; op < cuts_[end_cut]; ++op) {
    for (int32_t value : index_.trace.ops[op].writes) policy[value] = part.chosen->policy[at++];
  }
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
