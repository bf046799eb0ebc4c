// Implements the transport through our own NCCL communicator: meets the other ranks through the process group's store
// and gives tensors to the communicator.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "base/check.h"
#include "base/current_stream.h"
#include "base/torch_text.h"
#include "base/without_gil.h"
#include "ddp/transport/nccl/nccl_communicator.h"
#include "ddp/transport/profiler_record.h"
#include "ddp/transport/rank_ranges.h"
#include "ddp/transport/transport.h"
#include "ddp/transport/tree_sum.h"

namespace drivetrain::ddp {
namespace {

ncclDataType_t nccl_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kHalf:
      return ncclFloat16;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    case at::kByte:
      return ncclUint8;
    case at::kChar:
      return ncclInt8;
    default:
      throw UnsupportedError(text("transport 'nccl' does not reduce ", dtype, ": use transport='torch'."));
  }
}

// Returns a key of the group's store that this process has not used. Ranks get the same keys, as they make the group's
// communicators and their memory in the same order.
std::string next_key(const std::string& group_name) {
  static std::mutex mutex;
  static std::map<std::string, int> made;
  const std::lock_guard<std::mutex> lock(mutex);
  return text("drivetrain/nccl/", group_name, "/", made[group_name]++);
}

// Returns rank 0's id, on every rank.
ncclUniqueId share_id(const NcclApi& api, c10d::ProcessGroup& group, const std::string& group_name, const Ranks& ranks,
                      std::chrono::milliseconds timeout) {
  const auto store = group.getStore();
  if (!store) throw EnvironmentError(text("the process group '", group_name, "' has no store to meet through"));
  const std::string key = next_key(group_name);
  ncclUniqueId id = {};
  if (group.getRank() == 0) {
    if (const ncclResult_t result = api.ncclGetUniqueId(&id); result != ncclSuccess) {
      throw EnvironmentError(text("NCCL ", api.version, ": ncclGetUniqueId failed with NCCL error ",
                                  static_cast<int>(result), " (", api.ncclGetErrorString(result),
                                  "): ", api.ncclGetLastError(nullptr)));
    }
    store->set(key, std::vector<uint8_t>(id.internal, id.internal + sizeof(id.internal)));
    return id;
  }
  std::vector<uint8_t> shared;
  try {
    store->wait({key}, timeout);
    shared = store->get(key);
  } catch (const std::exception& error) {
    throw EnvironmentError(text(ranks.name(group.getRank()), " did not get the NCCL id of ", ranks.name(0),
                                " from the process group's store within ", timeout.count() / 1000.,
                                " s: ", error.what()));
  }
  if (shared.size() != sizeof(id.internal)) {
    throw EnvironmentError(text("the NCCL id of ", ranks.name(0), " in the process group's store (", key, ") has ",
                                shared.size(), " bytes, expected ", sizeof(id.internal)));
  }
  std::copy(shared.begin(), shared.end(), id.internal);
  return id;
}

// Returns a rank's failure; "" if none has one. Ranks use the store, which needs no device memory.
std::string failure_of_any_rank(c10d::ProcessGroup& group, const std::string& group_name, const Ranks& ranks,
                                const std::string& failure, std::chrono::milliseconds timeout) {
  if (group.getSize() == 1) return failure;
  const auto store = group.getStore();
  const std::string key = next_key(group_name), first = key + "/failure", all = key + "/all";
  const auto bytes_of = [](const std::string& words) { return std::vector<uint8_t>(words.begin(), words.end()); };
  try {
    if (!failure.empty()) store->set(first, bytes_of(text(ranks.name(group.getRank()), ": ", failure)));
    if (store->add(key + "/known", 1) == group.getSize()) store->set(all, bytes_of("known"));
    store->wait({all}, timeout);
    if (!store->check({first})) return "";
    const std::vector<uint8_t> words = store->get(first);
    return {words.begin(), words.end()};
  } catch (const std::exception& error) {
    throw EnvironmentError(text(ranks.name(group.getRank()), " did not learn from the process group's store within ",
                                timeout.count() / 1000.,
                                " s whether every rank has memory for its gradients: ", error.what()));
  }
}

using Kind = NcclCommunicator::Kind;

// Returns the name under which profiles know a launch of these kinds.
const char* name_of(const std::vector<NcclCommunicator::Collective>& collectives) {
  const bool is_alone = collectives.size() == 1;
  const Kind kind = collectives[0].kind;
  const auto is_other = [&](const auto& collective) { return collective.kind != kind; };
  if (kind == Kind::kSend || kind == Kind::kReceive) return "all_to_all";
  if (std::any_of(collectives.begin(), collectives.end(), is_other)) return "coalesced";
  switch (kind) {
    case Kind::kReduceScatter:
      return is_alone ? "reduce_scatter" : "reduce_scatter_coalesced";
    case Kind::kReduce:
      return is_alone ? "reduce" : "reduce_coalesced";
    case Kind::kAllGather:
      return is_alone ? "allgather" : "allgather_coalesced";
    case Kind::kBroadcast:
      return is_alone ? "broadcast" : "broadcast_coalesced";
    default:
      return is_alone ? "allreduce" : "allreduce_coalesced";
  }
}

class NcclComm final : public Comm {
 public:
  explicit NcclComm(const NcclOptions& options)
      : Comm(options.ranks),
        api_(options.api),
        group_name_(options.group_name),
        group_(c10d::resolve_process_group(options.group_name)),
        device_(options.device),
        timeout_(static_cast<int64_t>(options.timeout_s * 1e3)),
        release_cache_(options.release_cache) {
    const c10::DeviceGuard guard(device_);
    const ncclUniqueId id = share_id(*api_, *group_, group_name_, ranks(), timeout_);
    communicator_ = std::make_unique<NcclCommunicator>(NcclCommunicator::Options{
        api_, id, group_->getSize(), group_->getRank(), std::max<int>(device_.index(), 0), timeout_});
    if (!options.in_tree) return;
    tree_ = std::make_unique<TreeSum>(rank(), size(), [this](const auto&... given) { return exchange(given...); });
  }

  // Waits for the communicator's thread. The last owner of the group also waits for the group's threads.
  ~NcclComm() override {
    without_gil([this] { release(); });
  }

  int size() const override { return group_->getSize(); }
  int rank() const override { return group_->getRank(); }
  std::string name() const override {
    const std::string registration = why_not_.empty() ? communicator_->registration() : "unregistered";
    return text("nccl ", api_->version, registration.empty() ? "" : ", ", registration);
  }
  std::string why_not() const override { return why_not_; }
  void give_up(const std::string& why) override { communicator_->give_up(why); }

  at::Tensor allocate(int64_t bytes, c10::Device device) override {
    if (device != device_) {
      throw UserError(text("transport 'nccl' has its communicator on ", device_.str(), ", but there are parameters on ",
                           device.str(), ": have all on one device, or use transport='torch'."));
    }
    const c10::DeviceGuard guard(device_);
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    std::string failure;
    const auto allocated = communicator_->allocate(static_cast<size_t>(bytes), release_cache_, failure);
    if (!allocated && failure.empty()) return at::zeros({bytes}, options);  // NCCL is too old to allocate memory
    // Registration waits for every rank, so that all must first agree that each can take part.
    why_not_ = failure_of_any_rank(*group_, group_name_, ranks(), failure, timeout_);
    if (!why_not_.empty()) return at::zeros({bytes}, options);
    std::shared_ptr<void> memory = communicator_->register_memory(allocated);
    void* const data = memory.get();
    const auto give_back = [memory = std::move(memory)](void*) mutable { without_gil([&] { memory.reset(); }); };
    return at::from_blob(data, {bytes}, give_back, options, device).zero_();
  }

  std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat) override {
    if (flat.layout() != at::kStrided) {
      // NCCL has no sparse tensors. The process group reduces them over gloo.
      if (!sparse_)
        sparse_ = make_torch_comm(group_name_, group_->getBackend(device_.type())->getBackendName(), ranks());
      return sparse_->start_sum(flat);
    }
    return recording_collective("nccl:all_reduce", tag(), flat, [&]() -> std::unique_ptr<PendingReduce> {
      if (tree_ && TreeSum::takes(flat)) return tree_->start(flat);
      auto started = begin(flat);
      add(started, whole(flat));
      return std::make_unique<NcclReduce>(*this, std::move(started));
    });
  }

  std::unique_ptr<PendingReduce> start_scatter(const at::Tensor& flat,
                                               const std::shared_ptr<const RankRanges>& ranges) override {
    if (tree_ && TreeSum::takes(flat)) {
      return recording_collective("nccl:reduce_scatter", tag(), flat,
                                  [&] { return tree_->start_scatter(flat, *ranges); });
    }
    std::vector<RangeCall> calls;
    if (size() > 1 && flat.layout() == at::kStrided) {
      calls = scatter_calls(*ranges, static_cast<int64_t>(flat.nbytes()), size());
    }
    if (calls.empty()) return start_sum(flat);
    return recording_collective("nccl:reduce_scatter", tag(), flat, [&] {
      auto started = begin(flat);
      for (const RangeCall& call : calls) add(started, part(flat, call, Kind::kReduceScatter, Kind::kReduce));
      return std::make_unique<NcclReduce>(*this, std::move(started));
    });
  }

  // Begins at once: each gather is awaited by itself.
  std::unique_ptr<PendingReduce> start_gather(const at::Tensor& flat,
                                              const std::shared_ptr<const RankRanges>& ranges) override {
    return recording_collective("nccl:all_gather", tag(), flat, [&] {
      flush();
      auto started = begin(flat);
      const at::Tensor bytes = flat.view(at::kByte);
      for (const RangeCall& call : gather_calls(*ranges, size())) {
        add(started, part(bytes, call, Kind::kAllGather, Kind::kBroadcast));
      }
      flush();
      return std::make_unique<NcclReduce>(*this, std::move(started));
    });
  }

  void flush() override {
    std::vector<NcclCommunicator::Collective> collectives;
    std::vector<std::shared_ptr<Started>> started;
    int64_t numel = 0;
    for (auto& [collective, weak] : held_back_) {
      const std::shared_ptr<Started> one = weak.lock();
      if (!one) continue;  // its step was given up
      if (collective.kind != Kind::kReceive) {
        numel += static_cast<int64_t>(collective.count) * (collective.own == nullptr ? 1 : size());
      }
      collectives.push_back(std::move(collective));
      started.push_back(one);
    }
    held_back_.clear();
    if (collectives.empty()) return;
    const c10::DeviceGuard guard(device_);
    const char* const what = name_of(collectives);
    const auto group = recording_launch(*group_, ranks(), what, ++num_launched_, numel, started[0]->dtype,
                                        [&] { return communicator_->start(std::move(collectives), stream()); });
    for (const auto& one : started) one->group = group;
  }

 private:
  struct Started {
    at::ScalarType dtype;
    std::shared_ptr<NcclCommunicator::Group> group;  // null: held back
  };

  class NcclReduce final : public PendingReduce {
   public:
    NcclReduce(NcclComm& comm, std::shared_ptr<Started> started) : comm_(comm), started_(std::move(started)) {}
    void wait() override {
      const c10::DeviceGuard guard(comm_.device_);
      if (!started_->group) comm_.flush();
      DT_INVARIANT(started_->group != nullptr);
      comm_.communicator_->wait(*started_->group, comm_.stream());
    }
    bool is_done() override {
      const c10::DeviceGuard guard(comm_.device_);
      if (!started_->group) comm_.flush();
      return comm_.communicator_->is_done(*started_->group);
    }
    bool is_held_back() const override { return started_->group == nullptr; }

   private:
    NcclComm& comm_;
    std::shared_ptr<Started> started_;
  };

  cudaStream_t stream() const { return static_cast<cudaStream_t>(current_stream(device_)); }

  std::shared_ptr<Started> begin(const at::Tensor& flat) const {
    DT_INVARIANT(flat.is_contiguous());
    if (flat.device() != device_) {
      throw UserError(text("tensor is on ", flat.device().str(), ", expected ", device_.str()));
    }
    return std::make_shared<Started>(Started{flat.scalar_type(), nullptr});
  }

  void add(const std::shared_ptr<Started>& started, NcclCommunicator::Collective collective) {
    held_back_.emplace_back(std::move(collective), started);
  }

  NcclCommunicator::Collective whole(const at::Tensor& flat) const {
    NcclCommunicator::Collective collective;
    collective.values = flat.data_ptr();
    collective.count = static_cast<size_t>(flat.numel());
    collective.type = nccl_type(flat.scalar_type());
    // Keeps the storage only. Freeing a tensor with a Python object needs the GIL. A thread that asks for the GIL while
    // Python shuts down aborts the process.
    collective.keep = std::make_shared<c10::Storage>(flat.storage());
    return collective;
  }

  // Returns the collective of a part of the tensor. for_each, for_one: its kind where the part is of each rank, and of
  // one.
  NcclCommunicator::Collective part(const at::Tensor& flat, const RangeCall& call, Kind for_each, Kind for_one) const {
    const int64_t element = flat.element_size(), length = call.end - call.begin;
    NcclCommunicator::Collective collective = whole(flat);
    char* const begin = static_cast<char*>(collective.values) + call.begin;
    collective.values = begin;
    collective.count = static_cast<size_t>(length / element);
    if (call.kind == RangeCall::Kind::kEachRank) {
      collective.kind = for_each;
      collective.count /= size();
      collective.own = begin + rank() * (length / size());
    } else if (call.kind == RangeCall::Kind::kOneRank) {
      collective.kind = for_one;
      collective.root = call.rank;
    }
    return collective;
  }

  // See TreeSum::Exchange. Begins at once, as the sum waits for it. NCCL sends no message of 0 bytes.
  std::unique_ptr<PendingReduce> exchange(const at::Tensor& received, const at::Tensor& sent,
                                          const std::vector<int64_t>& received_counts,
                                          const std::vector<int64_t>& sent_counts) {
    flush();
    auto started = begin(sent);
    const auto add_messages = [&](const at::Tensor& bytes, const std::vector<int64_t>& counts, Kind kind) {
      int64_t begin = 0;
      for (int rank = 0; rank < size(); begin += counts[rank++]) {
        NcclCommunicator::Collective message = whole(bytes.narrow(0, begin, counts[rank]));
        message.kind = kind;
        message.root = rank;
        if (message.count > 0) add(started, std::move(message));
      }
    };
    add_messages(sent, sent_counts, Kind::kSend);
    add_messages(received, received_counts, Kind::kReceive);
    flush();
    return std::make_unique<NcclReduce>(*this, std::move(started));
  }

  void release() {
    held_back_.clear();
    if (const std::string left = communicator_ ? communicator_->end() : ""; !left.empty()) {
      TORCH_WARN("drivetrain: ", left);
    }
    communicator_.reset();
    tree_.reset();
    sparse_.reset();
    group_.reset();
  }

  const std::shared_ptr<const NcclApi> api_;
  const std::string group_name_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::Device device_;
  const std::chrono::milliseconds timeout_;
  const std::function<void()> release_cache_;
  std::string why_not_;  // why gradients lie in torch's memory instead of NCCL's
  std::unique_ptr<NcclCommunicator> communicator_;
  std::unique_ptr<Comm> sparse_;
  std::unique_ptr<TreeSum> tree_;  // null: NCCL sums in its own order
  std::vector<std::pair<NcclCommunicator::Collective, std::weak_ptr<Started>>> held_back_;
  int64_t num_launched_ = 0;
};

}  // namespace

std::pair<int64_t, int64_t> nccl_memory_bytes() {
  return {NcclCommunicator::memory_bytes(), NcclCommunicator::most_memory_bytes()};
}

std::unique_ptr<Comm> make_nccl_comm(const NcclOptions& options) { return std::make_unique<NcclComm>(options); }

}  // namespace drivetrain::ddp
