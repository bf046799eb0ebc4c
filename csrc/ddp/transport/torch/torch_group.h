// Declares the transport over any torch process group, for transports that build on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "ddp/transport/rank_ranges.h"
#include "ddp/transport/transport.h"
#include "ddp/transport/tree_sum.h"

namespace drivetrain::ddp {

// Waits for that long at most. Returns true if the future has completed, with a value or an error.
bool wait_for(c10::ivalue::Future& future, std::chrono::milliseconds limit);

class TorchReduce final : public PendingReduce {
 public:
  // gloo: the group that does the work, if its backend is gloo; else null.
  TorchReduce(c10::intrusive_ptr<c10d::Work> work, const c10::intrusive_ptr<c10d::ProcessGroup>& gloo)
      : work_(std::move(work)), is_gloo_(gloo.defined()), gloo_(gloo) {}
  ~TorchReduce() override;
  TorchReduce(const TorchReduce&) = delete;
  TorchReduce& operator=(const TorchReduce&) = delete;

  bool is_done() override { return work_->isCompleted(); }
  void wait() override;
  bool wait_for(std::chrono::milliseconds limit) override;
  // Returns a future that completes, with a value or an error, when the work does or shortly before.
  c10::intrusive_ptr<c10::ivalue::Future> future() const { return work_->getFuture(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  const bool is_gloo_;
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> gloo_;  // TorchComm owns it
};

class TorchComm final : public Comm {
 public:
  // backend: the name of the group's backend, if torch brings it; else "". in_tree: NCCL sums floats in the order of a
  // tree (SumJob::in_tree). The number of ranks is then a power of two.
  TorchComm(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string backend, Ranks ranks, bool in_tree = false);
  ~TorchComm() override;

  int size() const override { return group_->getSize(); }
  int rank() const override { return group_->getRank(); }
  std::string name() const override { return "torch"; }
  bool is_foreign() const override { return backend_.empty(); }
  at::Tensor allocate(int64_t bytes, c10::Device device) override;
  std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat) override;
  std::unique_ptr<PendingReduce> start_scatter(const at::Tensor& flat,
                                               const std::shared_ptr<const RankRanges>& ranges) override;
  std::unique_ptr<PendingReduce> start_gather(const at::Tensor& flat,
                                              const std::shared_ptr<const RankRanges>& ranges) override;
  void set_returning(const std::string& group_name) override;

  // Starts to send every rank its part of `sent`, and to receive the ranks' parts one behind another in `received`.
  // Both are uint8 [any]; the counts are each rank's bytes, [size].
  std::unique_ptr<TorchReduce> start_all_to_all(at::Tensor received, at::Tensor sent,
                                                std::vector<int64_t> received_counts, std::vector<int64_t> sent_counts);
  // Starts to bring every rank's `own` to all ranks, one behind another in `whole`, which may contain `own`.
  std::unique_ptr<TorchReduce> start_all_gather(const at::Tensor& whole, const at::Tensor& own);

 private:
  std::unique_ptr<PendingReduce> start_calls(const at::Tensor& flat, const std::vector<RangeCall>& calls, bool gathers);
  void start_call(const at::Tensor& flat, const RangeCall& call, bool gathers);

  c10::intrusive_ptr<c10d::ProcessGroup> gloo() const { return backend_ == "gloo" ? group_ : nullptr; }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::string backend_;
  std::unique_ptr<TreeSum> tree_;         // null: the group sums in its own order
  std::shared_ptr<TorchComm> returning_;  // null: sums go to one rank each
};

}  // namespace drivetrain::ddp
