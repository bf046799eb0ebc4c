// Exchanges pieces of a tensor and adds them in the order of a binary tree; see tree_sum.h.
#include "ddp/transport/tree_sum.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/device_event.h"
#include "base/stream_order.h"

namespace drivetrain::ddp {
namespace {

// Ends where an exchange has ended, and what a stream was given to do with its values.
class AfterExchange final : public PendingReduce {
 public:
  AfterExchange(std::unique_ptr<PendingReduce> exchange, const c10::Stream& stream)
      : exchange_(std::move(exchange)), device_(stream.device()), end_(device_) {
    end_.record(stream);
  }
  void wait() override {
    exchange_->wait();  // throws the transport's error
    end_.block(*stream_on(device_));
  }
  bool is_done() override { return exchange_->is_done() && end_.query(); }

 private:
  const std::unique_ptr<PendingReduce> exchange_;
  const c10::Device device_;
  DeviceEvent end_;
};

// Adds rows [a power of two, n] and returns the sum, which takes the place of the first row.
at::Tensor add_in_tree(const at::Tensor& rows) {
  at::Tensor sums = rows;
  while (sums.size(0) > 1) {
    const at::Tensor pairs = sums.view({sums.size(0) / 2, 2, rows.size(1)});
    sums = pairs.select(1, 0).add_(pairs.select(1, 1));
  }
  return sums;
}

}  // namespace

std::unique_ptr<PendingReduce> TreeSum::start(const at::Tensor& flat) {
  const int64_t element = flat.element_size();
  std::vector<int64_t> counts;  // bytes of each rank's piece
  for (int piece = 0; piece < size_; ++piece) {
    const int64_t end = piece_begin(flat.numel(), piece + 1, size_);
    counts.push_back((end - piece_begin(flat.numel(), piece, size_)) * element);
  }
  const int64_t own = counts[rank_];
  const std::vector<int64_t> own_counts(size_, own);
  const at::Tensor bytes = flat.view(at::kByte);
  Lane& lane = lane_after(flat);
  const c10::StreamGuard guard(lane.stream);
  const at::Tensor received = memory_of(lane, size_ * own);
  exchange_(received, bytes, own_counts, counts)->wait();
  const at::Tensor rows = received.view(flat.scalar_type()).view({size_, own / element});
  rows.narrow(0, 1, size_ - 1).copy_(add_in_tree(rows));
  auto back = exchange_(bytes, received, counts, own_counts);
  back->wait();  // the next sum uses the same memory
  return back;
}

std::unique_ptr<PendingReduce> TreeSum::start_scatter(const at::Tensor& flat, const RankRanges& ranges) {
  const int64_t element = flat.element_size();
  std::vector<std::vector<at::Tensor>> parts(size_);  // by rank
  std::vector<int64_t> counts(size_);                 // their bytes
  const auto give = [&](int rank, int64_t begin, int64_t end) {
    if (begin == end) return;
    parts[rank].push_back(flat.narrow(0, begin / element, (end - begin) / element));
    counts[rank] += end - begin;
  };
  int64_t end = 0;
  const auto give_all_gap_before = [&](int64_t begin) {
    for (int rank = 0; rank < size_ && begin - end >= kGapAlignment; ++rank) give(rank, end, begin);
  };
  for (const RankRange& range : ranges) {
    give_all_gap_before(range.begin);
    give(range.rank, range.begin, range.end);
    for (const int rank : range.also) give(rank, range.begin, range.end);
    end = range.end;
  }
  give_all_gap_before(static_cast<int64_t>(flat.nbytes()));
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  // Otherwise the busiest rank would receive more than in a sum and its way back.
  if (size_ * most >= 2 * static_cast<int64_t>(flat.nbytes())) return start(flat);

  std::vector<at::Tensor> all;
  int64_t total = 0;
  for (int rank = 0; rank < size_; ++rank) {
    all.insert(all.end(), parts[rank].begin(), parts[rank].end());
    total += counts[rank];
  }
  const int64_t own = counts[rank_];
  Lane& lane = lane_after(flat);
  const c10::StreamGuard guard(lane.stream);
  const at::Tensor memory = memory_of(lane, size_ * own + total);
  const at::Tensor received = memory.narrow(0, 0, size_ * own), sent = memory.narrow(0, size_ * own, total);
  at::Tensor packed = sent.view(flat.scalar_type());
  at::cat_out(packed, all);
  auto exchange = exchange_(received, sent, std::vector<int64_t>(size_, own), counts);
  exchange->wait();
  if (own > 0) {
    std::vector<int64_t> lengths;
    for (const at::Tensor& part : parts[rank_]) lengths.push_back(part.numel());
    const at::Tensor sums = add_in_tree(received.view(flat.scalar_type()).view({size_, own / element}));
    at::_foreach_copy_(parts[rank_], sums.view({-1}).split_with_sizes(lengths));
  }
  return std::make_unique<AfterExchange>(std::move(exchange), lane.stream);
}

// Returns the lane of the tensor's device, whose later work may use the tensor.
TreeSum::Lane& TreeSum::lane_after(const at::Tensor& flat) {
  DT_INVARIANT(flat.is_contiguous());
  const c10::Device device = flat.device();
  auto known = lanes_.find(device.index());
  if (known == lanes_.end()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    known = lanes_.emplace(device.index(), Lane{guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)}).first;
  }
  run_after(known->second.stream, *stream_on(device));
  record_use(flat.storage(), known->second.stream);
  return known->second;
}

// Returns uint8 [bytes] for work of the lane, which must be the current stream.
at::Tensor TreeSum::memory_of(Lane& lane, int64_t bytes) {
  if (!lane.memory.defined() || lane.memory.numel() < bytes) {
    lane.memory = at::Tensor();
    lane.memory = at::empty({bytes}, at::TensorOptions(at::kByte).device(lane.stream.device()));
  }
  return lane.memory.narrow(0, 0, bytes);
}

}  // namespace drivetrain::ddp
