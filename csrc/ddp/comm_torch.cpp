// The transport over any torch process group: gloo, NCCL, or whatever torch has.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "ddp/comm.h"

namespace drivetrain::ddp {
namespace {

class TorchReduce final : public PendingReduce {
 public:
  explicit TorchReduce(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  void wait() override { work_->wait(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

class TorchComm final : public Comm {
 public:
  explicit TorchComm(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

  int size() const override { return group_->getSize(); }

  // Only NCCL averages inside the collective; the others get gradients that are divided beforehand.
  bool averages() const override { return group_->getBackendType() == c10d::ProcessGroup::BackendType::NCCL; }

  std::unique_ptr<PendingReduce> start(const at::Tensor& flat) override {
    return start(flat, averages() ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
  }

  std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat) override { return start(flat, c10d::ReduceOp::SUM); }

 private:
  std::unique_ptr<PendingReduce> start(const at::Tensor& flat, c10d::ReduceOp::RedOpType op) {
    std::vector<at::Tensor> tensors = {flat};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    return std::make_unique<TorchReduce>(group_->allreduce(tensors, options));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace

std::unique_ptr<Comm> make_torch_comm(const std::string& group_name) {
  return std::make_unique<TorchComm>(c10d::resolve_process_group(group_name));
}

}  // namespace drivetrain::ddp
