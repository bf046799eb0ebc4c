// Dinic's maximum flow on the ops and values that a keeping decides about.
#include "budget/solver/min_cut.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace drivetrain::budget {
namespace {

constexpr int32_t kSource = 0, kSink = 1;
constexpr double kEndless = std::numeric_limits<double>::infinity();

}  // namespace

KeepingCut::KeepingCut(const TraceIndex& index, int32_t num_ops)
    : index_(index), node_of_op_(index.num_ops(), -1), node_of_value_(index.num_values(), -1) {
  const Trace& trace = index.trace;
  double all_seconds = 0;
  for (int32_t op = num_ops - 1; op >= 0; --op) {
    if (!index.may_be_replayed[op]) continue;
    node_of_op_[op] = num_nodes_++;
    all_seconds += trace.ops[op].seconds;
  }
  least_ = all_seconds * 1e-13;

  for (int32_t value = 0; value < index.num_values(); ++value) {
    if (!index.may_be_needed[value] || index.is_external(value) || index.writer[value] >= num_ops) continue;
    if (!index.can_be_replayed[value] && node_of_op_[index.writer[value]] >= 0) {
      double most = 0;
      for (const KeptForm& form : trace.values[value].forms) most = std::max(most, form.seconds);
      free_seconds_ += most;
    }
    if (index.is_taken[value] && !index.can_be_replayed[value]) {
      if (!trace.values[value].can_keep) {
        throw UserError(text("value ", value, " is taken in backward, cannot be replayed, and its memory is written ",
                             "over: expected one way to have it"));
      }
      always_kept_.push_back(value);
      continue;
    }
    node_of_value_[value] = index.is_taken[value] ? kSource : num_nodes_++;
    const int32_t op = index.can_be_replayed[value] ? node_of_op_[index.writer[value]] : kSink;
    const bool can_keep = trace.values[value].can_keep;
    const int32_t edge = add_edge(node_of_value_[value], op, can_keep ? 0 : kEndless);
    if (can_keep) keep_edges_.push_back({value, edge});
  }
  for (int32_t op = 0; op < num_ops; ++op) {
    if (node_of_op_[op] < 0) continue;
    add_edge(node_of_op_[op], kSink, trace.ops[op].seconds);
    for (int32_t value : index.reads[op]) {
      if (node_of_value_[value] > kSink) add_edge(node_of_op_[op], node_of_value_[value], kEndless);
    }
  }
  build_adjacency();
}

int32_t KeepingCut::add_edge(int32_t from, int32_t to, double capacity) {
  edges_.push_back({to, capacity});
  edges_.push_back({from, 0});
  return static_cast<int32_t>(edges_.size()) - 2;
}

void KeepingCut::build_adjacency() {
  const auto count = static_cast<int32_t>(edges_.size());
  first_edge_.assign(num_nodes_ + 1, 0);
  for (int32_t edge = 0; edge < count; ++edge) ++first_edge_[edges_[edge ^ 1].to + 1];
  for (int32_t node = 0; node < num_nodes_; ++node) first_edge_[node + 1] += first_edge_[node];
  std::vector<int32_t> next(first_edge_.begin(), first_edge_.end() - 1);
  edges_of_node_.resize(count);
  for (int32_t edge = 0; edge < count; ++edge) edges_of_node_[next[edges_[edge ^ 1].to]++] = edge;
}

double KeepingCut::price_of(int32_t value, double price, int8_t* way) const {
  const TraceValue& kept = index_.trace.values[value];
  double least = price * static_cast<double>(kept.bytes);
  *way = 0;
  for (size_t form = 0; form < kept.forms.size(); ++form) {
    const double cost = price * static_cast<double>(kept.forms[form].bytes) + kept.forms[form].seconds;
    if (cost >= least) continue;
    least = cost;
    *way = static_cast<int8_t>(form + 1);
  }
  return least;
}

void KeepingCut::set_price(double price) {
  int8_t way;
  if (price < price_) {  // from the start
    for (size_t edge = 0; edge < edges_.size(); edge += 2) {
      edges_[edge].left += edges_[edge + 1].left;
      edges_[edge + 1].left = 0;
    }
    flow_ = 0;
    for (const KeepEdge& keep : keep_edges_) edges_[keep.edge].left = price_of(keep.value, price, &way);
  } else {
    for (const KeepEdge& keep : keep_edges_) {
      edges_[keep.edge].left = std::max(0.0, price_of(keep.value, price, &way) - edges_[keep.edge + 1].left);
    }
  }
  price_ = price;
}

bool KeepingCut::find_levels() {
  level_.assign(num_nodes_, -1);
  level_[kSource] = 0;
  queue_.assign(1, kSource);
  for (size_t at = 0; at < queue_.size(); ++at) {
    const int32_t node = queue_[at];
    if (level_[kSink] >= 0 && level_[node] + 1 >= level_[kSink]) break;
    for (int32_t i = first_edge_[node]; i < first_edge_[node + 1]; ++i) {
      const Edge& edge = edges_[edges_of_node_[i]];
      if (edge.left <= least_ || level_[edge.to] >= 0) continue;
      level_[edge.to] = level_[node] + 1;
      queue_.push_back(edge.to);
    }
  }
  return level_[kSink] >= 0;
}

// Fills every shortest path, by depth-first search without recursion.
void KeepingCut::augment() {
  next_edge_.assign(first_edge_.begin(), first_edge_.end() - 1);
  path_.clear();
  int32_t node = kSource;
  while (true) {
    if (node == kSink) {
      double flow = kEndless;
      for (int32_t edge : path_) flow = std::min(flow, edges_[edge].left);
      flow_ += flow;
      size_t full = path_.size();
      for (size_t i = path_.size(); i-- > 0;) {
        edges_[path_[i]].left -= flow;
        edges_[path_[i] ^ 1].left += flow;
        if (edges_[path_[i]].left <= least_) full = i;
      }
      node = edges_[path_[full] ^ 1].to;
      path_.resize(full);
      continue;
    }
    int32_t& next = next_edge_[node];
    while (next < first_edge_[node + 1]) {
      const Edge& edge = edges_[edges_of_node_[next]];
      if (edge.left > least_ && level_[edge.to] == level_[node] + 1) break;
      ++next;
    }
    if (next < first_edge_[node + 1]) {
      path_.push_back(edges_of_node_[next]);
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

PricedKeeping KeepingCut::at(double price) {
  set_price(price);
  while (find_levels()) augment();
  // find_levels has reached the source's side.
  const Trace& trace = index_.trace;
  const auto is_replayed = [&](int32_t op) { return node_of_op_[op] >= 0 && level_[node_of_op_[op]] >= 0; };
  PricedKeeping found;
  found.keeping.assign(index_.num_values(), kForget);
  found.bound = flow_ - free_seconds_;
  const auto keep = [&](int32_t value) {
    double cost = price_of(value, price, &found.keeping[value]);
    const int8_t way = found.keeping[value];
    found.bytes += static_cast<double>(index_.kept_bytes(value, way));
    if (way > 0) found.seconds += trace.values[value].forms[way - 1].seconds;
    return cost;
  };
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (!index_.can_be_replayed[value] && trace.values[value].can_keep) found.keeping[value] = 0;
  }
  for (int32_t value : always_kept_) found.bound += keep(value);
  for (const KeepEdge& edge : keep_edges_) {
    const int32_t value = edge.value;
    if (level_[node_of_value_[value]] < 0) continue;
    if (!index_.can_be_replayed[value] || !is_replayed(index_.writer[value])) keep(value);
  }
  for (int32_t op = 0; op < index_.num_ops(); ++op) {
    if (is_replayed(op)) found.seconds += trace.ops[op].seconds;
  }
  return found;
}

}  // namespace drivetrain::budget
