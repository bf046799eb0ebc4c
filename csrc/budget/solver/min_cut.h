// Declares the minimum cut that finds the best policy where every byte saved at the end of forward has a price.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

// A policy, with its costs regardless of when values are in memory.
struct PricedPolicy {
  Policy policy;
  double bytes = 0;    // saved at the end of forward
  double seconds = 0;  // of replayed operations and of storage formats
  double bound = 0;    // a lower bound on seconds + price * bytes of every policy
};

// Returns the price of a byte at which two policies cost the same. `high` saves more bytes.
inline double price_between(const PricedPolicy& high, const PricedPolicy& low) {
  return std::max(0.0, (low.seconds - high.seconds) / (high.bytes - low.bytes));
}

// Solves a maximum flow by Dinic's algorithm. In the network, operations on the source's side are replayed, and values
// on it are needed. A replayed operation costs its seconds (an edge to the sink) and needs its reads (infinite edges).
// A needed value whose operation is not replayed is saved (an edge from value to operation). Backward's takes are the
// source itself.
class MinCut {
 public:
  explicit MinCut(const TraceIndex& index) : MinCut(index, index.num_ops()) {}
  // Covers the first `num_ops` operations only; values that only later operations read are not needed.
  MinCut(const TraceIndex& index, int32_t num_ops);

  PricedPolicy at(double price);

 private:
  struct Edge {
    int32_t to;
    double left;  // capacity without flow
  };
  struct SaveEdge {
    int32_t value;
    int32_t edge;
  };

  int32_t add_node();
  int32_t add_edge(int32_t from, int32_t to, double capacity);
  void set_price(double price);
  bool find_levels();
  void augment();
  double price_of(int32_t value, double price, int8_t* entry) const;

  const TraceIndex& index_;
  std::vector<int32_t> node_of_op_, node_of_value_;  // -1: not in the network
  std::vector<Edge> edges_;                          // each is followed by its reverse edge
  std::vector<std::vector<int32_t>> edges_of_node_ = std::vector<std::vector<int32_t>>(2);  // the source and the sink
  std::vector<SaveEdge> save_edges_;
  std::vector<int32_t> always_saved_;
  // Sums the longest restore time of each value that cannot be recomputed. A replay of its operation for another output
  // may restore the value as well.
  double free_seconds_ = 0;
  double flow_ = 0;
  double negligible_ = 0;  // smaller capacities count as 0
  std::vector<int32_t> level_, queue_, path_;
  std::vector<size_t> next_edge_;  // per node: an index into its edges
};

}  // namespace drivetrain::budget
