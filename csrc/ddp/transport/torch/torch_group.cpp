// Implements the transport over any torch process group.
#include "ddp/transport/torch/torch_group.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <iterator>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "base/without_gil.h"
#include "ddp/transport/torch/scatter.h"

namespace drivetrain::ddp {
namespace {

// A multiple of the time that gloo usually needs.
constexpr std::chrono::microseconds kLongestRelease(2000);

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Keeps works that a thread of gloo has not released yet. gloo's thread releases a work shortly after it reports the
// end, or later on busy cores. As the last owner it would ask for the GIL to free the work's tensors. While Python
// shuts down that aborts the process ("terminate called without an active exception").
//
// A group that ends waits for its works, up to its timeout, and another rank may never start its part. So a group with
// such a work is kept as well, until the process ends.
class UnreleasedWorks {
 public:
  // Frees what gloo has released since the last call.
  void keep(WorkPtr work, GroupPtr group) {
    std::vector<WorkPtr> released;  // freed after the mutex, as that may run Python's destructors
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_used = [](const WorkPtr& kept) { return kept.use_count() > 1; };
    const auto first = std::partition(works_.begin(), works_.end(), is_used);
    released.assign(std::make_move_iterator(first), std::make_move_iterator(works_.end()));
    works_.erase(first, works_.end());
    if (!work->isCompleted() && group) groups_.insert(std::move(group));
    works_.push_back(std::move(work));
  }

 private:
  std::mutex mutex_;
  std::vector<WorkPtr> works_;
  std::set<GroupPtr> groups_;
};

// Outlives the process's static objects, because works must not be freed at its end.
UnreleasedWorks& unreleased_works() {
  alignas(UnreleasedWorks) static unsigned char memory[sizeof(UnreleasedWorks)];
  static UnreleasedWorks& works = *new (memory) UnreleasedWorks;
  return works;
}

}  // namespace

bool wait_for(c10::ivalue::Future& future, std::chrono::milliseconds limit) {
  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_set = false;
  };
  if (future.completed()) return true;
  const auto signal = std::make_shared<Signal>();  // the callback may come after this call
  future.addCallback([signal](c10::ivalue::Future&) {
    const std::lock_guard<std::mutex> lock(signal->mutex);
    signal->is_set = true;
    signal->changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(signal->mutex);
  return signal->changed.wait_for(lock, limit, [&] { return signal->is_set; });
}

bool TorchReduce::wait_for(std::chrono::milliseconds limit) {
  if (is_gloo_) {
    try {
      work_->wait(limit);
    } catch (const std::exception&) {
      if (!work_->isCompleted()) return false;
    }
  }
  wait();
  return true;
}

TorchReduce::~TorchReduce() {
  if (!is_gloo_ || work_.use_count() <= 1) return;
  try {
    unreleased_works().keep(work_, gloo_.lock());
  } catch (const std::bad_alloc&) {
    work_.release();  // its memory is lost; to free it here could abort the process
  }
}

void TorchReduce::wait() {
  work_->wait();
  if (!is_gloo_) return;
  // Lets gloo release first, so that the work and its group are freed at their usual time.
  const auto deadline = std::chrono::steady_clock::now() + kLongestRelease;
  while (work_.use_count() > 1 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
}

namespace {

// An all-reduce of a script's own process group. As in torch's reducer only the work's future counts. A work written in
// Python may implement nothing else, and may leave the result in other memory.
class FutureReduce final : public PendingReduce {
 public:
  FutureReduce(WorkPtr work, at::Tensor flat)
      : work_(std::move(work)), future_(work_->getFuture()), flat_(std::move(flat)) {
    if (!future_) throw EnvironmentError("the process group's allreduce() returned a work whose get_future() is None");
  }

  bool is_done() override { return future_->completed(); }

  void wait() override {
    if (!flat_.defined()) return;
    future_->wait();
    const c10::IValue value = future_->value();  // rethrows the future's error
    if (value.isPyObject() && value.toPyObjectHolder()->extractTensors().empty()) {
      throw EnvironmentError(
          "the future of the process group's allreduce() holds no tensor. Only Python sees the error of "
          "Future.set_exception(): raise it in allreduce(), or in a callback passed to Future.then().");
    }
    const at::Tensor result = c10d::detail::parseCppCommHookResult(value);
    if (flat_.is_sparse() || !result.is_alias_of(flat_)) flat_.copy_(result);
    flat_.reset();
  }

  bool wait_for(std::chrono::milliseconds limit) override {
    if (!ddp::wait_for(*future_, limit)) return false;
    wait();
    return true;
  }

 private:
  const WorkPtr work_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  at::Tensor flat_;  // undefined once the result is there
};

}  // namespace

TorchComm::TorchComm(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string backend, Ranks ranks, bool in_tree)
    : Comm(std::move(ranks)), group_(std::move(group)), backend_(std::move(backend)) {
  if (!in_tree) return;
  tree_ =
      std::make_unique<TreeSum>(rank(), size(), [this](const auto&... given) { return start_all_to_all(given...); });
}

TorchComm::~TorchComm() {
  without_gil([this] { group_.reset(); });  // the group's last owner joins its threads
}

at::Tensor TorchComm::allocate(int64_t bytes, c10::Device device) {
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

std::unique_ptr<PendingReduce> TorchComm::start_sum(const at::Tensor& flat) {
  if (tree_ && TreeSum::takes(flat)) return tree_->start(flat);
  std::vector<at::Tensor> tensors = {flat};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  if (is_foreign()) return std::make_unique<FutureReduce>(group_->allreduce(tensors, options), flat);
  return std::make_unique<TorchReduce>(group_->allreduce(tensors, options), gloo());
}

std::unique_ptr<PendingReduce> TorchComm::start_scatter(const at::Tensor& flat,
                                                        const std::shared_ptr<const RankRanges>& ranges) {
  if (tree_ && TreeSum::takes(flat)) return tree_->start_scatter(flat, *ranges);
  if (backend_ == "nccl" && size() > 1 && flat.layout() == at::kStrided && flat.is_cuda()) {
    const auto calls = scatter_calls(*ranges, static_cast<int64_t>(flat.nbytes()), size());
    if (!calls.empty()) return start_calls(flat, calls, /*gathers=*/false);
  }
  const std::optional<ElementType> type = element_type(flat.scalar_type());
  if (backend_ == "gloo" && size() > 1 && flat.layout() == at::kStrided && flat.is_cpu() && type) {
    if (auto reduce = start_torch_scatter(flat, *type, *ranges, *this, returning_)) return reduce;
  }
  return start_sum(flat);
}

std::unique_ptr<PendingReduce> TorchComm::start_gather(const at::Tensor& flat,
                                                       const std::shared_ptr<const RankRanges>& ranges) {
  if (backend_ != "nccl" || !flat.is_cuda()) return nullptr;
  return start_calls(flat.view(at::kByte), gather_calls(*ranges, size()), /*gathers=*/true);
}

// Starts the calls as one group of NCCL.
std::unique_ptr<PendingReduce> TorchComm::start_calls(const at::Tensor& flat, const std::vector<RangeCall>& calls,
                                                      bool gathers) {
  DT_INVARIANT(flat.is_contiguous());
  const c10::DeviceType device = flat.device().type();
  group_->startCoalescing(device);
  try {
    for (const RangeCall& call : calls) start_call(flat, call, gathers);
  } catch (...) {
    group_->endCoalescing(device);  // else the group would take the next collectives
    throw;
  }
  return std::make_unique<TorchReduce>(group_->endCoalescing(device), /*gloo=*/nullptr);
}

void TorchComm::start_call(const at::Tensor& flat, const RangeCall& call, bool gathers) {
  const int64_t element = flat.element_size(), numel = (call.end - call.begin) / element;
  at::Tensor part = flat.narrow(0, call.begin / element, numel);
  std::vector<at::Tensor> parts = {part};
  if (call.kind == RangeCall::Kind::kAllRanks) {
    group_->allreduce(parts);
  } else if (call.kind == RangeCall::Kind::kOneRank && gathers) {
    c10d::BroadcastOptions options;
    options.rootRank = call.rank;
    group_->broadcast(parts, options);
  } else if (call.kind == RangeCall::Kind::kOneRank) {
    c10d::ReduceOptions options;
    options.rootRank = call.rank;
    group_->reduce(parts, options);
  } else {
    at::Tensor own = part.narrow(0, rank() * (numel / size()), numel / size());
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // not every supported torch has their new names
    gathers ? group_->_allgather_base(part, own) : group_->_reduce_scatter_base(own, part);
#pragma GCC diagnostic pop
  }
}

void TorchComm::set_returning(const std::string& group_name) {
  returning_ = std::make_shared<TorchComm>(c10d::resolve_process_group(group_name), "gloo", ranks());
  DT_INVARIANT(returning_->size() == size() && returning_->rank() == rank());
}

std::unique_ptr<TorchReduce> TorchComm::start_all_to_all(at::Tensor received, at::Tensor sent,
                                                         std::vector<int64_t> received_counts,
                                                         std::vector<int64_t> sent_counts) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // not every supported torch has its new name
  auto work = group_->alltoall_base(received, sent, received_counts, sent_counts);
#pragma GCC diagnostic pop
  return std::make_unique<TorchReduce>(std::move(work), gloo());
}

std::unique_ptr<TorchReduce> TorchComm::start_all_gather(const at::Tensor& whole, const at::Tensor& own) {
  at::Tensor to = whole.view({-1}).view(at::kByte), from = own.view({-1}).view(at::kByte);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // not every supported torch has its new name
  return std::make_unique<TorchReduce>(group_->_allgather_base(to, from), gloo());
#pragma GCC diagnostic pop
}

namespace {

class TorchExchange final : public HostExchange {
 public:
  explicit TorchExchange(const std::string& group_name)
      : comm_(std::make_unique<TorchComm>(c10d::resolve_process_group(group_name), "gloo", Ranks())) {}

  // Sends each host the message by itself: all arrive after one way over the network, whatever the number of hosts.
  std::shared_ptr<Round> start(const HostMessage& mine) override {
    const at::Tensor sent = at::zeros({comm_->size(), kBytes}, at::kByte);
    for (int host = 0; host < comm_->size(); ++host) {
      std::memcpy(sent.data_ptr<uint8_t>() + host * kBytes, &mine, sizeof(mine));
    }
    const at::Tensor received = at::zeros_like(sent);
    const std::vector<int64_t> rows(comm_->size(), 1);
    return std::make_shared<TorchRound>(comm_->start_all_to_all(received, sent, rows, rows), received);
  }

 private:
  static constexpr int64_t kBytes = sizeof(HostMessage);
  static_assert(std::is_trivially_copyable_v<HostMessage>);

  class TorchRound final : public Round {
   public:
    TorchRound(std::unique_ptr<TorchReduce> work, at::Tensor received)
        : work_(std::move(work)), received_(std::move(received)) {}

    bool wait_for(std::chrono::milliseconds limit) override {
      if (limit.count() > 0) return work_->wait_for(limit);  // torch takes 0 for no limit
      return work_->is_done();
    }

    std::vector<HostMessage> received() const override {
      work_->wait();
      std::vector<HostMessage> messages(received_.size(0));
      std::memcpy(messages.data(), received_.const_data_ptr(), received_.nbytes());
      return messages;
    }

   private:
    const std::unique_ptr<TorchReduce> work_;
    const at::Tensor received_;
  };

  std::unique_ptr<TorchComm> comm_;
};

}  // namespace

std::unique_ptr<HostExchange> make_host_exchange(const std::string& group_name) {
  return std::make_unique<TorchExchange>(group_name);
}

std::optional<ElementType> element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kDouble:
      return ElementType::kFloat64;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kInt:
      return ElementType::kInt32;
    case at::kLong:
      return ElementType::kInt64;
    default:
      return std::nullopt;
  }
}

std::unique_ptr<Comm> make_torch_comm(const std::string& group_name, const std::string& backend, Ranks ranks,
                                      bool in_tree) {
  return std::make_unique<TorchComm>(c10d::resolve_process_group(group_name), backend, std::move(ranks), in_tree);
}

}  // namespace drivetrain::ddp
