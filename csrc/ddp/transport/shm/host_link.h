// Declares the sums over hosts of the transport through shared memory, from the first rank of each host.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "ddp/transport/shm/shm_exchange.h"
#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

// Sums over hosts, from the first rank of each.
class TorchLink final : public HostLink {
 public:
  // owner_of: returns the owner that keeps the memory at an address mapped. The process group may use the memory for
  // longer than any rank waits.
  TorchLink(std::shared_ptr<Comm> leaders, std::function<std::shared_ptr<void>(const char*)> owner_of)
      : leaders_(std::move(leaders)), owner_of_(std::move(owner_of)) {}

  void start(char* values, ElementType type, int64_t numel, const std::shared_ptr<const RankRanges>& ranges) override;
  bool finish_oldest() override;

 private:
  std::shared_ptr<Comm> leaders_;
  std::function<std::shared_ptr<void>(const char*)> owner_of_;
  std::deque<std::unique_ptr<PendingReduce>> started_;
};

// Divides a sum of the process group by the number of ranks.
class MeanOfSum final : public PendingReduce {
 public:
  MeanOfSum(std::unique_ptr<PendingReduce> sum, at::Tensor flat, int size)
      : sum_(std::move(sum)), flat_(std::move(flat)), size_(size) {}
  bool is_done() override { return sum_->is_done(); }
  void wait() override;
  bool wait_for(std::chrono::milliseconds limit) override;

 private:
  std::unique_ptr<PendingReduce> sum_;
  at::Tensor flat_;
  int size_;
};

}  // namespace drivetrain::ddp
