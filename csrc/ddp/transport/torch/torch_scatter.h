// Declares the reduce-scatter over a gloo process group. gloo's own is an all-reduce of which a rank keeps its part.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "ddp/transport/rank_sum.h"
#include "ddp/transport/torch/two_exchanges.h"

namespace drivetrain::ddp {

// Bytes [begin, end) of a tensor.
using ByteSpan = std::pair<int64_t, int64_t>;

// Every rank sends each other rank the values that this one sums, and adds them in the order of gloo's all-reduce. The
// result then has the same bits.
class TorchScatter final : public TwoExchanges {
 public:
  // See TwoExchanges::pays(). Every rank sums bytes that belong to no rank itself.
  static bool pays(const RankRanges& ranges, int64_t bytes, int size);

  // flat: contiguous, on the CPU. returning: null if no range has further ranks.
  TorchScatter(at::Tensor flat, ElementType type, const RankRanges& ranges, TorchComm& group,
               std::shared_ptr<TorchComm> returning);

 private:
  // Lists of spans that ranks exchange, and that travel one behind another.
  using Spans = std::vector<ByteSpan>;

  std::deque<Message> exchange(TorchComm& comm, const std::vector<Spans>& sent, const std::vector<Spans>& received,
                               int64_t most) const;
  void sum(const Message& message) override;
  void add_in_order(char* own, const char* received, const Message& message, int64_t chunk, int64_t bytes) const;
  std::deque<Message> start_back(TorchComm& comm) override;
  void take(const Message& message) override;
  char* byte(int64_t offset) const { return static_cast<char*>(flat_.data_ptr()) + offset; }

  const at::Tensor flat_;
  const ElementType type_;
  const int rank_, size_;
  Spans own_;                   // what this rank sums
  std::vector<Spans> onwards_;  // which of these sums go to each rank
  std::vector<Spans> from_;     // whose sums come from each rank
  int64_t most_back_ = 0;       // the most bytes that any rank sends another in the second exchange
};

}  // namespace drivetrain::ddp
