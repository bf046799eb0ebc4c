// Declares the reduce-scatter that rounds float32 values for the wire. Its results have the bits of the all-reduce in
// wire.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "ddp/transport/rank_ranges.h"
#include "ddp/transport/torch/two_exchanges.h"
#include "ddp/transport/torch/wire_format.h"

namespace drivetrain::ddp {

// Assigns values to the ranks that sum them. The unit is the block of the all-reduce, whose values are rounded
// together. A block that belongs to several ranks is summed by each of them.
struct ScatterPlan {
  // The values that one rank sums in an all-reduce. Blocks are counted from its begin.
  struct Piece {
    int64_t begin;
    int64_t end;
    int64_t on_wire;      // its first byte, where all pieces lie one behind another
    int64_t first_block;  // of all blocks of the tensor
  };
  // Whole blocks of one piece.
  struct Span {
    int64_t begin;
    int64_t end;
    size_t piece;
  };
  using Spans = std::vector<Span>;

  WireFormat format;
  int rank, size;
  std::vector<Piece> pieces;
  std::vector<Spans> summed;   // by the rank that sums them
  std::vector<Spans> onwards;  // which of this rank's sums go to each rank in a second exchange
  std::vector<Spans> from;     // whose sums come from each rank in it
  int64_t most = 0;            // the most blocks that any rank sums
  int64_t most_back = 0;       // the most blocks that any rank sends another in the second exchange
  bool pays = false;           // whether the busiest rank sends and receives fewer values than in an all-reduce
};

// ranges: of a tensor of that many float32 values. All ranks' plans are equal, except for the parts that concern the
// rank itself.
ScatterPlan plan_scatter(const RankRanges& ranges, int64_t numel, WireFormat format, int rank, int size);

// Every rank sends each other rank the rounded blocks that this one sums. As in an all-reduce, these are added in rank
// order and rounded again. A second exchange, in another group, brings sums to further ranks of their ranges.
class WireScatter final : public TwoExchanges {
 public:
  // flat: float32, contiguous, on the CPU. carried: null if no errors are carried. returning: null if no range has
  // further ranks.
  WireScatter(at::Tensor flat, ScatterPlan plan, CarriedErrors* carried, TorchComm& group,
              std::shared_ptr<TorchComm> returning);

  // Sums the values that have arrived, so that little is left to wait().
  bool is_done() override;

 private:
  using Span = ScatterPlan::Span;
  using Spans = ScatterPlan::Spans;

  template <class Visit>
  void visit_message(const Spans& spans, int64_t at, Visit&& visit) const;
  int64_t bytes_in_message(const Spans& spans, int64_t at) const;
  int64_t blocks_in(const Span& span) const;
  int64_t first_block(const Span& span) const;
  Message start(TorchComm& comm, const std::vector<Spans>& sent, std::vector<int64_t> received_counts,
                int64_t at) const;
  void encode_once(const Span& span);
  void sum(const Message& message) override;
  std::deque<Message> start_back(TorchComm& comm) override;
  void take(const Message& message) override;
  char* value(int64_t index) const { return static_cast<char*>(flat_.data_ptr()) + index * sizeof(float); }
  char* wire(const Span& span) const;

  const at::Tensor flat_;
  const ScatterPlan plan_;
  std::shared_ptr<TransferErrors> errors_;  // null: none are carried
  at::Tensor rounded_;                      // uint8, this rank's values and then its sums as they travel, by place
  // [blocks]; empty: none are carried. To round a block again would add its errors again.
  std::vector<bool> is_rounded_;
};

}  // namespace drivetrain::ddp
