// Cuts where little crosses, solves each kind of segment once, and puts segments together by dynamic programming.
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
constexpr size_t kFewCuts = 320;        // so few that the smallest peak is found to the byte
constexpr size_t kMaxChoices = 20;      // of a segment, on the hull
constexpr size_t kMaxEnumerated = 256;  // keepings of a segment that are all tried
constexpr int64_t kMaxWork = 30'000;    // ops in all kinds of segments
constexpr size_t kNumLevels = 400;      // of kept bytes
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int64_t kNotReached = std::numeric_limits<int64_t>::max();

std::vector<int32_t> positions(const std::vector<uint8_t>& is_possible) {
  std::vector<int32_t> found;
  for (int32_t at = 1; at + 1 < static_cast<int32_t>(is_possible.size()); ++at) {
    if (is_possible[at]) found.push_back(at);
  }
  return found;
}

// Every position at which no more crosses than at its neighbours; then fewer, those with higher hills around them
// first, until at most kMaxCuts are left. Equal ones are treated equally, so that what repeats is cut equally.
std::vector<int32_t> valleys(const std::vector<int64_t>& bytes, const std::vector<uint8_t>& is_possible) {
  std::vector<int32_t> found = positions(is_possible);
  const auto keep_low = [&](double most_above_neighbours) {
    std::vector<int32_t> left;
    for (size_t i = 0; i < found.size(); ++i) {
      const int64_t here = bytes[found[i]];
      const int64_t before = i > 0 ? bytes[found[i - 1]] : here,
                    after = i + 1 < found.size() ? bytes[found[i + 1]] : here;
      const double above = static_cast<double>(here + 1) / static_cast<double>(std::min(before, after) + 1);
      if (above <= most_above_neighbours) left.push_back(found[i]);
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

// All that there are where these are few; none where they are many.
std::vector<Keeping> all_keepings(const TraceIndex& index, const Keeping& one) {
  std::vector<int32_t> decided;
  for (int32_t op = index.num_ops() - 1; op >= 0; --op) {
    for (int32_t value : index.writes[op]) {
      if (!index.may_be_needed[value] || !index.can_be_replayed[value]) continue;
      if (index.trace.values[value].can_keep) decided.push_back(value);
    }
  }
  std::vector<Keeping> keepings = {one};
  for (int32_t value : decided) {
    const size_t count = keepings.size(), num_ways = index.trace.values[value].forms.size() + 2;
    if (count * num_ways > kMaxEnumerated) return {};
    for (size_t way = 0; way < num_ways; ++way) {
      for (size_t i = 0; i < count; ++i) {
        Keeping& next = way == 0 ? keepings[i] : keepings.emplace_back(keepings[i]);
        next[value] = static_cast<int8_t>(static_cast<int>(way) - 1);
      }
    }
  }
  return keepings;
}

}  // namespace

// What makes segments alike: everything but the seconds, which are measured.
struct Segments::Kind {
  uint64_t hash = 0xcbf29ce484222325;
  size_t num_values = 0;
  double seconds = 0;

  bool is_like(const Kind& other) const {
    constexpr double kNoise = 0.3;
    return num_values == other.num_values && std::abs(seconds - other.seconds) <= kNoise * seconds;
  }

  void add(int64_t number) { hash = mix(hash, static_cast<uint64_t>(number)); }
};

Segments::Segments(const TraceIndex& index, Cuts cuts, bool uses_min_cut)
    : index_(index), uses_min_cut_(uses_min_cut) {
  find_last_readers();
  find_cuts(cuts);
  find_menus();
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

void Segments::find_cuts(Cuts cuts) {
  const int32_t count = index_.num_ops();
  std::vector<int64_t> bytes(count + 1, 0);
  std::vector<int32_t> num_lost(count + 1, 0);
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (index_.is_external(value) || last_reader_[value] < 0) continue;
    const TraceValue& crossing = index_.trace.values[value];
    const int32_t first = index_.writer[value] + 1, end = last_reader_[value] + 1;
    bytes[first] += crossing.bytes;
    if (end <= count) bytes[end] -= crossing.bytes;
    if (crossing.can_keep) continue;
    ++num_lost[first];
    if (end <= count) --num_lost[end];
  }
  std::vector<uint8_t> is_possible(count + 1, 0);
  for (int32_t at = 0; at <= count; ++at) {
    if (at > 0) {
      bytes[at] += bytes[at - 1];
      num_lost[at] += num_lost[at - 1];
    }
    is_possible[at] = num_lost[at] == 0;
  }
  cuts_ = {0};
  for (int32_t cut : cuts == Cuts::kInValleys ? valleys(bytes, is_possible) : positions(is_possible))
    cuts_.push_back(cut);
  cuts_.push_back(count);
}

Segments::Kind Segments::kind_of(int32_t first_op, int32_t end_op) const {
  const Trace& trace = index_.trace;
  Kind kind;
  for (int32_t op = first_op; op < end_op; ++op) {
    kind.seconds += trace.ops[op].seconds;
    kind.add(-1);
    for (int32_t value : index_.reads[op]) {
      const int32_t writer = index_.writer[value];
      if (writer < first_op) continue;
      int32_t place = 0;
      for (int32_t written : index_.writes[writer]) {
        if (written == value) break;
        ++place;
      }
      kind.add(op - writer);
      kind.add(place);
    }
    kind.add(-2);
    kind.num_values += index_.writes[op].size();
    for (int32_t value : index_.writes[op]) {
      const TraceValue& written = trace.values[value];
      kind.add(written.bytes);
      kind.add(written.can_keep + 2 * index_.can_be_replayed[value] + 4 * index_.takes_over[value] +
               8 * is_crossing(value, end_op));
      for (const KeptForm& form : written.forms) kind.add(form.bytes);
      kind.add(index_.num_tickets[value]);
      kind.add(index_.is_taken[value]);
    }
  }
  return kind;
}

Trace Segments::part(int32_t first_op, int32_t end_op) const {
  const Trace& trace = index_.trace;
  Trace part;
  std::vector<std::pair<int32_t, int32_t>> uses;  // where, of which local value
  std::unordered_map<int32_t, int32_t> local;
  for (int32_t op = first_op; op < end_op; ++op) {
    TraceOp& copy = part.ops.emplace_back();
    copy.seconds = trace.ops[op].seconds;
    for (int32_t value : index_.reads[op]) {
      if (index_.writer[value] >= first_op) copy.reads.push_back(local.at(value));
    }
    for (int32_t value : index_.writes[op]) {
      const auto index = static_cast<int32_t>(part.values.size());
      local[value] = index;
      copy.writes.push_back(index);
      TraceValue& written = part.values.emplace_back(trace.values[value]);
      const bool is_inside = written.replaces >= 0 && index_.writer[written.replaces] >= first_op;
      written.replaces = is_inside ? local.at(written.replaces) : -1;
      written.can_forget = index_.can_be_replayed[value];
      for (int32_t use : uses_of_value_[value]) uses.emplace_back(use, index);
      if (!is_crossing(value, end_op)) continue;
      written.can_forget = false;
      part.uses.push_back({index, true});  // needed until backward comes here, by whoever replays what comes after
    }
  }
  std::sort(uses.begin(), uses.end());
  for (const auto& [use, value] : uses) part.uses.push_back({value, trace.uses[use].is_release});
  return part;
}

// Points of the lower hull of bytes and seconds, the one that is farthest from its neighbours first.
Segments::Menu Segments::menu_of(const Trace& part) const {
  const TraceIndex index(part);
  KeepingCut cut(index);
  Simulator simulator(index);
  double all_seconds = 0;
  for (const TraceOp& op : part.ops) all_seconds += op.seconds;
  std::vector<PricedKeeping> hull = {cut.at(0), cut.at(all_seconds + 1)};  // from the most bytes to the least
  std::vector<std::pair<double, size_t>> gaps;  // how much there may be between a point and the next
  std::vector<uint8_t> is_closed = {0};         // nothing between a point and the next
  while (uses_min_cut_ && hull.size() < kMaxChoices) {
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
    const PricedKeeping &high = hull[widest], &low = hull[widest + 1];
    const double price = std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes));
    PricedKeeping between = cut.at(price);
    const double on_line = high.seconds + price * high.bytes;
    if (between.seconds + price * between.bytes >= on_line * (1 - 1e-9) || between.bytes >= high.bytes ||
        between.bytes <= low.bytes) {
      is_closed[widest] = 1;
      continue;
    }
    hull.insert(hull.begin() + static_cast<std::ptrdiff_t>(widest) + 1, std::move(between));
    is_closed.insert(is_closed.begin() + static_cast<std::ptrdiff_t>(widest), 0);
  }
  Menu menu;
  const auto add = [&](const Keeping& keeping) {
    const Outcome outcome = simulator.run(keeping);
    const Choice choice{outcome.forward_bytes, outcome.peak_bytes, outcome.seconds, keeping};
    const auto is_no_worse = [](const Choice& a, const Choice& b) {
      return a.kept_bytes <= b.kept_bytes && a.peak_bytes <= b.peak_bytes && a.seconds <= b.seconds;
    };
    if (std::any_of(menu.begin(), menu.end(), [&](const Choice& other) { return is_no_worse(other, choice); })) return;
    std::erase_if(menu, [&](const Choice& other) { return is_no_worse(choice, other); });
    menu.push_back(choice);
  };
  for (const PricedKeeping& point : hull) add(point.keeping);
  for (const Keeping& keeping : all_keepings(index, hull[0].keeping)) add(keeping);
  return menu;
}

void Segments::find_menus() {
  struct Known {
    Kind kind;
    size_t menu;
  };
  std::unordered_map<uint64_t, std::vector<Known>> known;
  segments_.resize(cuts_.size());
  int64_t work = 0;
  for (size_t length = 1; length < cuts_.size() && work < kMaxWork; length += 1 + length / 16) {
    for (size_t first = 0; first + length < cuts_.size(); ++first) {
      const int32_t first_op = cuts_[first], end_op = cuts_[first + length];
      const Kind kind = kind_of(first_op, end_op);
      std::vector<Known>& alike = known[kind.hash];
      auto same = std::find_if(alike.begin(), alike.end(), [&](const Known& it) { return it.kind.is_like(kind); });
      if (same == alike.end()) {
        alike.push_back({kind, menus_.size()});
        same = alike.end() - 1;
        menus_.push_back(menu_of(part(first_op, end_op)));
        work += end_op - first_op;
      }
      segments_[first + length].push_back({first, same->menu});
    }
  }
}

void Segments::put(const Step& step, size_t end_cut, Keeping& keeping) const {
  size_t at = 0;
  for (int32_t op = cuts_[step.first_cut]; op < cuts_[end_cut]; ++op) {
    for (int32_t value : index_.writes[op]) keeping[value] = step.choice->keeping[at++];
  }
}

// Fewer bytes kept are always better here, so that one state for each cut is enough.
std::optional<Keeping> Segments::smallest_within(int64_t budget_bytes) const {
  std::vector<int64_t> kept(cuts_.size(), kNotReached);
  std::vector<Step> steps(cuts_.size());
  kept[0] = 0;
  for (size_t end = 1; end < cuts_.size(); ++end) {
    for (const Segment& segment : segments_[end]) {
      const int64_t before = kept[segment.first_cut];
      if (before == kNotReached) continue;
      for (const Choice& choice : menus_[segment.menu]) {
        if (before + choice.peak_bytes > budget_bytes || before + choice.kept_bytes >= kept[end]) continue;
        kept[end] = before + choice.kept_bytes;
        steps[end] = {segment.first_cut, &choice};
      }
    }
  }
  if (kept.back() == kNotReached) return std::nullopt;
  Keeping keeping(index_.num_values(), kForget);
  for (size_t end = cuts_.size() - 1; end > 0; end = steps[end].first_cut) put(steps[end], end, keeping);
  return keeping;
}

Keeping Segments::smallest() const {
  int64_t low = 0, high = 1;
  for (const TraceValue& value : index_.trace.values) high += 2 * value.bytes;
  const int64_t exactness = cuts_.size() <= kFewCuts ? 1 : high / 2048;
  std::optional<Keeping> smallest = smallest_within(high);
  DT_INVARIANT(smallest.has_value());
  while (high - low > exactness) {
    const int64_t middle = low + (high - low) / 2;
    std::optional<Keeping> smaller = smallest_within(middle);
    (smaller ? high : low) = middle;
    if (smaller) smallest = std::move(smaller);
  }
  return *smallest;
}

std::optional<Keeping> Segments::best(int64_t budget_bytes) const {
  // What is least up to a cut with about so many bytes kept, and how that came.
  struct State {
    int64_t kept_bytes = 0;
    double seconds = kNever;
    Step step;
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
      for (const Choice& choice : menus_[segment.menu]) {
        for (size_t state = 0; state < before.size(); ++state) {
          if (before[state].kept_bytes + choice.peak_bytes > budget_bytes) break;
          const int64_t kept = before[state].kept_bytes + choice.kept_bytes;
          State& level = levels[static_cast<size_t>(static_cast<double>(kept) * levels_per_byte)];
          const double seconds = before[state].seconds + choice.seconds;
          if (seconds >= level.seconds) continue;
          level = {kept, seconds, {segment.first_cut, &choice}, state};
        }
      }
    }
    double least = kNever;
    for (const State& level : levels) {
      if (level.seconds >= least) continue;
      least = level.seconds;
      states[end].push_back(level);
    }
  }
  if (states.back().empty()) return std::nullopt;
  Keeping keeping(index_.num_values(), kForget);
  size_t state = states.back().size() - 1;
  for (size_t end = count - 1; end > 0;) {
    const State& reached = states[end][state];
    put(reached.step, end, keeping);
    state = reached.before;
    end = reached.step.first_cut;
  }
  return keeping;
}

}  // namespace drivetrain::budget
