// Implements the transport over any torch process group.
#include "ddp/transport/torch_group.h"

#include <ATen/ops/zeros.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace drivetrain::ddp {
namespace {

// A multiple of the time that gloo usually needs.
constexpr std::chrono::microseconds kLongestRelease(2000);

}  // namespace

void TorchReduce::wait() {
  work_->wait();
  if (!is_gloo_) return;
  // gloo's thread releases the work shortly after it reports the end. If it is the last owner by then, it asks for the
  // GIL to free the work's tensors. While Python shuts down that aborts the process ("terminate called without an
  // active exception"), as it does in about one torch DDP process in twenty on busy cores. This wait lets gloo release
  // first.
  const auto deadline = std::chrono::steady_clock::now() + kLongestRelease;
  while (work_.use_count() > 1 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
}

// A group may have several backends ("cpu:gloo,cuda:nccl"). The one for the gradients' device counts.
TorchComm::TorchComm(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::DeviceType device, Ranks ranks)
    : Comm(std::move(ranks)), group_(std::move(group)), backend_(group_->getBackend(device)->getBackendName()) {}

// Releases the GIL, as the group's last owner joins its threads, which may wait for the GIL to free a tensor.
TorchComm::~TorchComm() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    const pybind11::gil_scoped_release no_gil;
    group_.reset();
  }
}

at::Tensor TorchComm::allocate(int64_t bytes, c10::Device device) {
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

std::unique_ptr<PendingReduce> TorchComm::start_sum(const at::Tensor& flat) {
  std::vector<at::Tensor> tensors = {flat};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  return std::make_unique<TorchReduce>(group_->allreduce(tensors, options), backend_ == "gloo");
}

void TorchComm::broadcast(const at::Tensor& values) {
  std::vector<at::Tensor> tensors = {values};
  TorchReduce(group_->broadcast(tensors), backend_ == "gloo").wait();
}

std::unique_ptr<TorchReduce> TorchComm::start_all_to_all(at::Tensor received, at::Tensor sent,
                                                         std::vector<int64_t> received_counts,
                                                         std::vector<int64_t> sent_counts) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // not every supported torch has its new name
  auto work = group_->alltoall_base(received, sent, received_counts, sent_counts);
#pragma GCC diagnostic pop
  return std::make_unique<TorchReduce>(std::move(work), backend_ == "gloo");
}

std::string describe_tag(uint64_t tag) {
  const std::string step = " in synchronized step " + std::to_string(tag >> 24);
  switch (static_cast<Purpose>(tag & 0xff)) {
    case Purpose::kBucket:
      return "bucket " + std::to_string(tag >> 8 & 0xffff) + step;
    case Purpose::kUsedMap:
      return "the map of used parameters" + step;
    case Purpose::kWeights:
      return "the weights" + step;
    case Purpose::kReplicas:
      return "the comparison of replicas" + step;
    case Purpose::kPlan:
      return "the planning of buckets" + step;
  }
  return "an unknown purpose";
}

std::unique_ptr<Comm> make_torch_comm(const std::string& group_name, c10::DeviceType device, Ranks ranks) {
  return std::make_unique<TorchComm>(c10d::resolve_process_group(group_name), device, std::move(ranks));
}

}  // namespace drivetrain::ddp
