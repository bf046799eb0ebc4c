// The keeping that is best when every byte kept until the end of forward has a price: a minimum cut, so it is exact.
#pragma once

#include <cstdint>
#include <vector>

#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

// A keeping, and what it costs without regard to when anything is there.
struct PricedKeeping {
  Keeping keeping;
  double bytes = 0;    // kept at the end of forward
  double seconds = 0;  // of replayed ops and of forms
  double bound = 0;    // no keeping has less seconds + price * bytes
};

// The network: an op is on the source's side if it is replayed, a value if it is needed. A replayed op costs its
// seconds (an edge to the sink) and needs its reads (endless edges); a value that is needed and whose op is not
// replayed is kept (an edge from value to op). What backward takes is the source itself. Prices that rise let the flow
// before be a start.
class KeepingCut {
 public:
  explicit KeepingCut(const TraceIndex& index) : KeepingCut(index, index.num_ops()) {}
  // Of the first ops alone: what only others read is not needed.
  KeepingCut(const TraceIndex& index, int32_t num_ops);

  PricedKeeping at(double price);

 private:
  struct Edge {
    int32_t to;
    double left;  // capacity without flow
  };
  struct KeepEdge {
    int32_t value;
    int32_t edge;
  };

  int32_t add_edge(int32_t from, int32_t to, double capacity);
  void build_adjacency();
  void set_price(double price);
  bool find_levels();
  void augment();
  double price_of(int32_t value, double price, int8_t* way) const;

  const TraceIndex& index_;
  std::vector<int32_t> node_of_op_, node_of_value_;  // -1: in no cut
  int32_t num_nodes_ = 2;                            // the source and the sink
  std::vector<Edge> edges_;                          // the one back is next to each
  std::vector<int32_t> edges_of_node_, first_edge_;
  std::vector<KeepEdge> keep_edges_;
  std::vector<int32_t> always_kept_;
  double free_seconds_ = 0;  // of forms of values that nobody replays for themselves: an output beside them may be
  double price_ = 0;
  double flow_ = 0;
  double least_ = 0;  // capacities below it are none
  std::vector<int32_t> level_, next_edge_, queue_, path_;
};

}  // namespace drivetrain::budget
