// Declares reduce-scatters over a process group: an exchange of values, and one of sums. gloo's own is an all-reduce of
// which a rank keeps its part.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "ddp/transport/torch/torch_group.h"
#include "ddp/transport/torch/wire_format.h"

namespace drivetrain::ddp {

// Assigns the values of a tensor to the ranks that sum them, in blocks of values that travel together. A block that
// belongs to several ranks is summed by each of them. All ranks' plans are equal, except for the parts that concern the
// rank itself.
struct ScatterPlan {
  // Values whose blocks are counted from the first one.
  struct Piece {
    int64_t begin;
    int64_t end;
    int64_t on_wire = 0;      // its first byte, where all pieces travel one behind another
    int64_t first_block = 0;  // of all blocks of the tensor
  };
  // Whole blocks of one piece.
  struct Span {
    int64_t begin;
    int64_t end;
    size_t piece;
  };
  using Spans = std::vector<Span>;

  int rank, size;
  int64_t block;  // values
  std::vector<Piece> pieces;
  std::vector<Spans> summed = {};   // by the rank that sums them
  std::vector<Spans> onwards = {};  // which of this rank's sums go to each rank in a second exchange
  std::vector<Spans> from = {};     // whose sums come from each rank in it
  int64_t most = 0;                 // the most blocks that any rank sums
  int64_t most_back = 0;            // the most blocks that any rank sends another in the second exchange
  // The busiest rank sends and receives fewer values than in an all-reduce. This excludes that a rank of a few rows
  // gets the values of all others.
  bool pays = false;

  // Takes the ranges of a tensor whose elements have that many bytes.
  void assign(const RankRanges& ranges, int64_t element);
  int64_t blocks_in(const Span& span) const { return (span.end - span.begin + block - 1) / block; }
};

// Every rank sends each other rank the values that this one sums. A second exchange, in another group, brings sums to
// further ranks.
class Scatter : public PendingReduce {
 public:
  // Sums the values that have arrived, so that little is left to wait().
  bool is_done() override;
  void wait() override;
  bool wait_for(std::chrono::milliseconds limit) override;

 protected:
  using Span = ScatterPlan::Span;
  using Spans = ScatterPlan::Spans;

  // most_values: that a rank sends another at once. returning: the group of the second exchange; null if the plan has
  // none.
  Scatter(ScatterPlan plan, int64_t most_values, std::shared_ptr<TorchComm> returning);
  // Starts the first exchange, at the end of constructors.
  void start(TorchComm& group);

  // Returns the bytes of that many values as they travel.
  virtual int64_t bytes_of_values(int64_t numel) const = 0;
  // Returns where this rank's values of a span lie, and then their sum, as they travel.
  virtual char* wire(const Span& span) const = 0;
  // Comes before values of a span travel.
  virtual void encode_once(const Span& /*span*/) {}
  // Sums the ranks' values of a span. before: this rank's values before the span.
  virtual void sum(const Span& span, std::vector<char*> inputs, int64_t before) = 0;
  // Takes another rank's sum of a span.
  virtual void take(const Span& span, const char* received) = 0;

  const ScatterPlan plan_;

 private:
  // A part of an exchange. Ranks exchange lists of spans.
  struct Message {
    std::unique_ptr<TorchReduce> work;
    at::Tensor received;          // uint8, what the ranks sent, by rank
    int64_t at;                   // the block with which it begins in each list
    std::vector<int64_t> counts;  // received bytes, by rank
  };

  template <class Visit>
  void visit_message(const Spans& spans, int64_t at, Visit&& visit) const;
  int64_t bytes_in_message(const Spans& spans, int64_t at) const;
  Message start_message(TorchComm& comm, const std::vector<Spans>& sent, const std::vector<Spans>& received,
                        int64_t at) const;
  void sum_message(const Message& message);
  void take_message(const Message& message);

  const int64_t at_once_;  // blocks
  std::deque<Message> there_, back_;
  std::shared_ptr<TorchComm> returning_;  // null once the second exchange has begun
};

// Start the reduce-scatter of a contiguous tensor on the CPU. Return null if an all-reduce is better. returning: null:
// sums go to one rank each.

// Adds values in the order of gloo's all-reduce, so that the result has the same bits. in_tree: in a tree's (SumJob).
std::unique_ptr<PendingReduce> start_torch_scatter(const at::Tensor& flat, ElementType type, const RankRanges& ranges,
                                                   TorchComm& group, std::shared_ptr<TorchComm> returning,
                                                   bool in_tree = false);

// Rounds float32 values for the wire. As in the all-reduce of wire.cpp, values are added in rank order and rounded
// again, so that the result has the same bits. carried: null if no errors are carried.
std::unique_ptr<PendingReduce> start_wire_scatter(const at::Tensor& flat, WireFormat format, const RankRanges& ranges,
                                                  CarriedErrors* carried, TorchComm& group,
                                                  std::shared_ptr<TorchComm> returning);

}  // namespace drivetrain::ddp
