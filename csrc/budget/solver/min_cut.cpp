// Builds the flow network of a trace and solves it by Dinic's algorithm.
#include "budget/solver/min_cut.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace drivetrain::budget {
namespace {

constexpr int32_t kSource = 0, kSink = 1;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

}  // namespace

MinCut::MinCut(const TraceIndex& index, int32_t num_ops)
    : index_(index), node_of_op_(index.num_ops(), -1), node_of_value_(index.num_values(), -1) {
  const Trace& trace = index.trace;
  double all_seconds = 0;
  for (int32_t op = num_ops - 1; op >= 0; --op) {
    if (!index.may_be_replayed[op]) continue;
    node_of_op_[op] = add_node();
    all_seconds += trace.ops[op].seconds;
  }
  negligible_ = all_seconds * 1e-13;

  for (int32_t value = 0; value < index.num_values(); ++value) {
    if (!index.may_be_needed[value] || index.is_external(value) || index.writer[value] >= num_ops) continue;
    if (!index.can_recompute[value] && node_of_op_[index.writer[value]] >= 0) {
      double most = 0;
      for (const FormatPrice& format : trace.values[value].formats) most = std::max(most, format.seconds);
      free_seconds_ += most;
    }
    if (index.is_taken[value] && !index.can_recompute[value]) {
      if (!trace.values[value].can_save) {
        throw UserError(text("value ", value,
                             " is taken in backward, but it can be neither saved nor recomputed: expected ",
                             "one of the two"));
      }
      always_saved_.push_back(value);
      continue;
    }
    node_of_value_[value] = index.is_taken[value] ? kSource : add_node();
    const int32_t op = index.can_recompute[value] ? node_of_op_[index.writer[value]] : kSink;
    const bool can_save = trace.values[value].can_save;
    const int32_t edge = add_edge(node_of_value_[value], op, can_save ? 0 : kUnlimited);
    if (can_save) save_edges_.push_back({value, edge});
  }
  for (int32_t op = 0; op < num_ops; ++op) {
    if (node_of_op_[op] < 0) continue;
    add_edge(node_of_op_[op], kSink, trace.ops[op].seconds);
    for (int32_t value : index.reads[op]) {
      if (node_of_value_[value] > kSink) add_edge(node_of_op_[op], node_of_value_[value], kUnlimited);
    }
  }
}

int32_t MinCut::add_node() {
  edges_of_node_.emplace_back();
  return static_cast<int32_t>(edges_of_node_.size()) - 1;
}

int32_t MinCut::add_edge(int32_t from, int32_t to, double capacity) {
  const auto edge = static_cast<int32_t>(edges_.size());
  edges_of_node_[from].push_back(edge);
  edges_of_node_[to].push_back(edge + 1);
  edges_.push_back({to, capacity});
  edges_.push_back({from, 0});
  return edge;
}

double MinCut::price_of(int32_t value, double price, int8_t* entry) const {
  const TraceValue& saved = index_.trace.values[value];
  double least = price * static_cast<double>(saved.bytes);
  *entry = 0;
  for (size_t format = 0; format < saved.formats.size(); ++format) {
    const double cost = price * static_cast<double>(saved.formats[format].bytes) + saved.formats[format].seconds;
    if (cost >= least) continue;
    least = cost;
    *entry = static_cast<int8_t>(format + 1);
  }
  return least;
}

void MinCut::set_price(double price) {
  for (size_t edge = 0; edge < edges_.size(); edge += 2) {  // takes the flow away
    edges_[edge].left += edges_[edge + 1].left;
    edges_[edge + 1].left = 0;
  }
  flow_ = 0;
  int8_t entry;
  for (const SaveEdge& save : save_edges_) edges_[save.edge].left = price_of(save.value, price, &entry);
}

bool MinCut::find_levels() {
  level_.assign(edges_of_node_.size(), -1);
  level_[kSource] = 0;
  queue_.assign(1, kSource);
  for (size_t at = 0; at < queue_.size(); ++at) {
    const int32_t node = queue_[at];
    if (level_[kSink] >= 0 && level_[node] + 1 >= level_[kSink]) break;
    for (int32_t index : edges_of_node_[node]) {
      const Edge& edge = edges_[index];
      if (edge.left <= negligible_ || level_[edge.to] >= 0) continue;
      level_[edge.to] = level_[node] + 1;
      queue_.push_back(edge.to);
    }
  }
  return level_[kSink] >= 0;
}

// Fills every shortest path. Searches depth-first without recursion, because paths may be as long as the trace.
void MinCut::augment() {
  next_edge_.assign(edges_of_node_.size(), 0);
  path_.clear();
  int32_t node = kSource;
  while (true) {
    if (node == kSink) {
      double flow = kUnlimited;
      for (int32_t edge : path_) flow = std::min(flow, edges_[edge].left);
      flow_ += flow;
      size_t full = path_.size();
      for (size_t i = path_.size(); i-- > 0;) {
        edges_[path_[i]].left -= flow;
        edges_[path_[i] ^ 1].left += flow;
        if (edges_[path_[i]].left <= negligible_) full = i;
      }
      node = edges_[path_[full] ^ 1].to;
      path_.resize(full);
      continue;
    }
    const std::vector<int32_t>& edges = edges_of_node_[node];
    size_t& next = next_edge_[node];
    while (next < edges.size()) {
      const Edge& edge = edges_[edges[next]];
      if (edge.left > negligible_ && level_[edge.to] == level_[node] + 1) break;
      ++next;
    }
    if (next < edges.size()) {
      path_.push_back(edges[next]);
      node = edges_[path_.back()].to;
    } else if (path_.empty()) {
      return;
    } else {
      level_[node] = -1;
      node = edges_[path_.back() ^ 1].to;
      path_.pop_back();
      ++next_edge_[node];
    }
  }
}

PricedPolicy MinCut::at(double price) {
  set_price(price);
  while (find_levels()) augment();
  // The levels of the last search mark the source's side.
  const Trace& trace = index_.trace;
  const auto is_replayed = [&](int32_t op) { return node_of_op_[op] >= 0 && level_[node_of_op_[op]] >= 0; };
  PricedPolicy found;
  found.policy.assign(index_.num_values(), kRecompute);
  found.bound = flow_ - free_seconds_;
  const auto save = [&](int32_t value) {
    double cost = price_of(value, price, &found.policy[value]);
    const int8_t entry = found.policy[value];
    found.bytes += static_cast<double>(index_.saved_bytes(value, entry));
    if (entry > 0) found.seconds += trace.values[value].formats[entry - 1].seconds;
    return cost;
  };
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (!index_.can_recompute[value] && trace.values[value].can_save) found.policy[value] = 0;
  }
  for (int32_t value : always_saved_) found.bound += save(value);
  for (const SaveEdge& edge : save_edges_) {
    const int32_t value = edge.value;
    if (level_[node_of_value_[value]] < 0) continue;
    if (!index_.can_recompute[value] || !is_replayed(index_.writer[value])) save(value);
  }
  for (int32_t op = 0; op < index_.num_ops(); ++op) {
    if (is_replayed(op)) found.seconds += trace.ops[op].seconds;
  }
  return found;
}

}  // namespace drivetrain::budget
