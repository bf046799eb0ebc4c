// Declares sums over ranks on a device, in the order of a binary tree, for transports that can exchange pieces.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "ddp/transport/rank_ranges.h"
#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

// Adds on a stream of its own, and keeps memory for the largest tensor there. The host waits for nothing, and the
// exchanges have the same order on all ranks. ATen rounds every sum to the tensor's type, as kernels of rank_sum.h do.
class TreeSum {
 public:
  // Starts to send every rank its part of `sent`, and to receive the ranks' parts one behind another in `received`, on
  // the current stream. Both are uint8 [any]; the counts are each rank's bytes, [size].
  using Exchange = std::function<std::unique_ptr<PendingReduce>(const at::Tensor& received, const at::Tensor& sent,
                                                                const std::vector<int64_t>& received_counts,
                                                                const std::vector<int64_t>& sent_counts)>;

  // The number of ranks is a power of two.
  TreeSum(int rank, int size, Exchange exchange) : rank_(rank), size_(size), exchange_(std::move(exchange)) {}

  // Returns true if the order of a tensor's sums matters. Others may be reduced in any way.
  static bool takes(const at::Tensor& flat) {
    return flat.is_floating_point() && flat.is_cuda() && flat.layout() == at::kStrided && flat.numel() > 0;
  }
  // Leaves every rank the sums of the whole tensor.
  std::unique_ptr<PendingReduce> start(const at::Tensor& flat);
  // As Comm::start_scatter().
  std::unique_ptr<PendingReduce> start_scatter(const at::Tensor& flat, const RankRanges& ranges);

 private:
  struct Lane {
    c10::Stream stream;
    at::Tensor memory = {};  // uint8
  };

  Lane& lane_after(const at::Tensor& flat);
  static at::Tensor memory_of(Lane& lane, int64_t bytes);

  const int rank_, size_;
  const Exchange exchange_;
  std::map<c10::DeviceIndex, Lane> lanes_;
};

}  // namespace drivetrain::ddp
