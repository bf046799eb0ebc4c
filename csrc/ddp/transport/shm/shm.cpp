// Implements the transport through shared memory: shares memory with the ranks of the same host and gives tensors to
// the exchange.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/without_gil.h"
#include "ddp/transport/processes.h"
#include "ddp/transport/profiler_record.h"
#include "ddp/transport/rank_ranges.h"
#include "ddp/transport/shm/host_link.h"
#include "ddp/transport/shm/shm_exchange.h"
#include "ddp/transport/shm/shm_segment.h"
#include "ddp/transport/transport.h"

namespace drivetrain::ddp {
namespace {

// The staging area is for small tensors outside of shared memory, such as the map of used parameters.
constexpr int64_t kStagingBytes = 64 << 10;
constexpr int64_t kPage = 4096;
// Between hosts a tensor goes in parts: one is summed or copied within the host while others are on their way. More
// parts would leave fewer of the exchange's operations to other buckets.
constexpr int64_t kMostParts = 16;

// Messages that ranks exchange to share memory. Each has an error, the reason why the rank cannot go on; "": it can.
struct PeerStatus {
  char error[192] = "";
};
struct Announcement : PeerStatus {
  ShmSegment::Address address;
};
struct StatusAndCores : PeerStatus {
  CoreSet cores;
};

class ShmComm final : public Comm {
 public:
  explicit ShmComm(const ShmOptions& options)
      : Comm(options.ranks),
        torch_(options.group),
        group_(c10d::resolve_process_group(options.group_name)),
        in_tree_(options.in_tree) {
    title_ = group_->getBackend(c10::DeviceType::CPU)->getBackendName() + ":all_reduce";
    const int rank = group_->getRank();
    if (static_cast<int>(options.hosts.size()) != group_->getSize()) {
      throw UserError(text("hosts has ", options.hosts.size(), " entries, expected one for each of the group's ",
                           group_->getSize(), " ranks"));
    }
    bool several_hosts = false;
    std::vector<int64_t> hosts;  // in the order of their first ranks
    for (int other = 0; other < group_->getSize(); ++other) {
      several_hosts |= options.hosts[other] != options.hosts[rank];
      const auto found = std::find(hosts.begin(), hosts.end(), options.hosts[other]);
      host_of_.push_back(static_cast<int>(found - hosts.begin()));
      number_here_.push_back(options.hosts[other] == options.hosts[rank] ? num_local_ranks() : -1);
      if (found == hosts.end()) hosts.push_back(options.hosts[other]);
      if (options.hosts[other] == options.hosts[rank]) host_.push_back(other);
    }
    num_hosts_ = static_cast<int>(hosts.size());
    if (several_hosts && host_[0] == rank) {
      DT_INVARIANT(options.leaders != nullptr && options.leaders->rank() == host_of_[rank]);
      leaders_ = options.leaders;
      link_ = std::make_unique<TorchLink>(options.leaders, [this](const char* values) { return owner_of(values); });
    }
    while (host_[local_rank_] != rank) ++local_rank_;
    const int64_t shared_state_bytes = ShmExchange::shared_state_bytes(num_local_ranks());
    staging_offset_ = (shared_state_bytes + kPage - 1) / kPage * kPage;
    shared_state_ = share(staging_offset_ + kStagingBytes);
    if (!shared_state_) return;

    ShmExchange::Options exchange;
    exchange.rank = local_rank_;
    exchange.size = num_local_ranks();
    exchange.several_hosts = several_hosts;
    exchange.link = link_.get();
    exchange.timeout = std::chrono::nanoseconds(static_cast<int64_t>(options.timeout_s * 1e9));
    exchange.spin = spins_;
    exchange.in_tree = options.in_tree;
    for (int other : host_) exchange.rank_names.push_back(ranks().name(other));
    exchange.is_dead = [this](int local_rank) { return processes_[local_rank].has_ended(); };
    exchange_.emplace(shared_state_->base[0], std::move(exchange));
  }

  ~ShmComm() override {
    exchange_.reset();
    unmap_others();
    without_gil([this] { release_groups(); });  // the groups' last owner joins threads
  }

  int size() const override { return torch_->size(); }
  int rank() const override { return torch_->rank(); }
  std::string name() const override { return exchange_ ? "shm" : torch_->name(); }
  std::string why_not() const override { return why_not_; }
  void set_returning(const std::string& group_name) override { torch_->set_returning(group_name); }
  bool averages() const override { return exchange_.has_value(); }
  bool spins() const override { return exchange_ && spins_; }
  // Between hosts the process group of the leaders works in the background.
  bool in_background() const override { return !exchange_ || num_local_ranks() < size(); }

  // Memory is rounded between hosts only, on each host's first rank.
  bool carries_errors() const override {
    return torch_->carries_errors() && (!exchange_ || num_local_ranks() < size());
  }

  std::shared_ptr<void> carry_errors(const at::Tensor& memory) override {
    if (!exchange_) return torch_->carry_errors(memory);
    return leaders_ ? leaders_->carry_errors(memory) : nullptr;
  }

  bool has_summed(const at::Tensor& values) const override {
    const auto* const begin = static_cast<const char*>(values.const_data_ptr());
    return exchange_ && exchange_->has_summed(begin, begin + values.nbytes());
  }

  at::Tensor allocate(int64_t bytes, c10::Device device) override {
    if (!exchange_ || !device.is_cpu()) return torch_->allocate(bytes, device);
    std::shared_ptr<SharedBuffer> buffer = share(bytes);
    if (!buffer) {
      exchange_.reset();
      unmap_others();
      buffers_.clear();
      shared_state_.reset();
      processes_.clear();
      return torch_->allocate(bytes, device);
    }
    std::erase_if(buffers_, [](const auto& other) { return other.expired(); });
    buffers_.push_back(buffer);
    // The tensor owns the buffer, with the mappings of the other ranks' memory while this transport exists.
    const auto keep = [buffer](void*) {};
    return at::from_blob(buffer->base[local_rank_], {bytes}, keep, at::dtype(at::kByte));
  }

  std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat) override {
    if (!exchange_) return torch_->start_sum(flat);
    if (auto reduce = start_shared(flat, 1)) return reduce;
    return torch_->start_sum(flat);
  }

  std::unique_ptr<PendingReduce> start_mean(const at::Tensor& flat, std::optional<double> weight,
                                            const std::shared_ptr<const RankRanges>& ranges) override {
    // Outside of a tree a 16-bit sum would be rounded once, and one that is divided later is rounded twice.
    const bool has_same_bits = flat.is_floating_point() && (in_tree_ || flat.element_size() > 2);
    if (!exchange_ || (weight && (num_local_ranks() < size() || !has_same_bits))) return nullptr;
    if (auto reduce = start_reduce(flat, 1.0 / size(), ranges, weight)) return reduce;
    return weight ? nullptr : std::make_unique<MeanOfSum>(torch_->start_sum(flat), flat, size());
  }

  std::unique_ptr<PendingReduce> start_scatter(const at::Tensor& flat,
                                               const std::shared_ptr<const RankRanges>& ranges) override {
    if (!exchange_) return torch_->start_scatter(flat, ranges);
    if (auto reduce = start_reduce(flat, 1, ranges)) return reduce;
    return torch_->start_sum(flat);
  }

  std::unique_ptr<PendingReduce> start_gather(const at::Tensor& flat,
                                              const std::shared_ptr<const RankRanges>& ranges) override {
    if (!exchange_ || num_local_ranks() < size()) return nullptr;
    return start_shared(flat, 1, Exchange::kGather, ranges);
  }

 private:
  // One allocation, mapped from all ranks of this host.
  struct SharedBuffer {
    std::shared_ptr<ShmSegment> own;
    std::vector<ShmSegment> others;
    std::vector<char*> base;  // [local ranks]
    int64_t bytes;
    std::optional<Residency> residency;  // of the other ranks' memory
  };

  // The use of the staging area. The operation in it shares this, and may outlive the transport.
  struct Staging {
    uint64_t number = 0;      // of the last operation in the area
    bool is_awaited = false;  // its result is still to be copied out
  };

  class ShmReduce final : public PendingReduce {
   public:
    // numbers: the first operation and the last.
    ShmReduce(ShmComm& comm, std::pair<uint64_t, uint64_t> numbers, at::Tensor staged)
        : comm_(comm), next_(numbers.first), last_(numbers.second), staged_(std::move(staged)) {
      if (staged_.defined()) staging_ = comm.staging_state_;
    }
    ~ShmReduce() override { leave_staging(); }
    bool is_done() override {
      while (next_ < last_ && comm_.exchange_->is_done(next_)) ++next_;
      return next_ == last_ && comm_.exchange_->is_done(last_);
    }
    bool wait_for(std::chrono::milliseconds limit) override {
      const auto deadline = std::chrono::steady_clock::now() + limit;
      while (comm_.exchange_->wait_until(next_, deadline)) {
        if (next_ == last_) {
          copy_out();
          return true;
        }
        ++next_;
      }
      return false;
    }
    void wait() override {
      for (; next_ < last_; ++next_) comm_.exchange_->wait(next_);
      comm_.exchange_->wait(last_);
      copy_out();
    }

   private:
    void copy_out() {
      if (!staging_) return;
      std::memcpy(staged_.data_ptr(), comm_.staging(comm_.local_rank_), staged_.nbytes());
      leave_staging();
    }

    void leave_staging() {
      if (staging_) staging_->is_awaited = false;
      staging_.reset();
    }

    ShmComm& comm_;
    uint64_t next_;  // the first operation that is not known to be complete, or the last
    const uint64_t last_;
    at::Tensor staged_;
    std::shared_ptr<Staging> staging_;  // while this operation uses the area
  };

  int num_local_ranks() const { return static_cast<int>(host_.size()); }
  char* staging(int local_rank) const { return shared_state_->base[local_rank] + staging_offset_; }

  std::shared_ptr<void> owner_of(const char* values) const {
    for (const auto& weak : buffers_) {
      const std::shared_ptr<SharedBuffer> buffer = weak.lock();
      if (buffer && values >= buffer->base[local_rank_] && values < buffer->base[local_rank_] + buffer->bytes)
        return buffer;
    }
    return shared_state_;
  }

  // Unmaps the other ranks' memory: without further sums a tensor needs this rank's memory only.
  void unmap_others() {
    for (const auto& weak : buffers_) {
      if (const std::shared_ptr<SharedBuffer> buffer = weak.lock()) buffer->others.clear();
    }
  }

  void release_groups() {
    link_.reset();
    leaders_.reset();
    torch_.reset();
    group_.reset();
  }

  // ranges: of a reduce-scatter; null: an all-reduce. Returns null where start_shared() does.
  std::unique_ptr<PendingReduce> start_reduce(const at::Tensor& flat, double scale,
                                              const std::shared_ptr<const RankRanges>& ranges,
                                              std::optional<double> weight = std::nullopt) {
    if (!ranges) return start_shared(flat, scale, Exchange::kAllReduce, nullptr, nullptr, weight);
    const bool has_all_ranks = num_local_ranks() == size();
    const auto here = has_all_ranks ? ranges : std::make_shared<const RankRanges>(renumbered(*ranges, number_here_));
    const auto of_hosts = leaders_ ? std::make_shared<const RankRanges>(renumbered(*ranges, host_of_)) : nullptr;
    return start_shared(flat, scale, Exchange::kReduceScatter, here, of_hosts, weight);
  }

  // Returns null where the process group must reduce: for other types, and for large tensors outside of shared memory.
  std::unique_ptr<PendingReduce> start_shared(const at::Tensor& flat, double scale,
                                              Exchange exchange = Exchange::kAllReduce,
                                              std::shared_ptr<const RankRanges> ranges = nullptr,
                                              std::shared_ptr<const RankRanges> host_ranges = nullptr,
                                              std::optional<double> weight = std::nullopt) {
    const std::optional<ElementType> type = element_type(flat.scalar_type());
    if (flat.layout() != at::kStrided) return nullptr;  // sparse
    DT_INVARIANT(flat.is_contiguous() && (scale == 1 || flat.is_floating_point()));
    if (!type || !flat.is_cpu()) return nullptr;
    ShmExchange::Operation operation = {{}, *type, flat.numel(), scale};
    operation.exchange = exchange;
    operation.ranges = std::move(ranges);
    operation.host_ranges = std::move(host_ranges);
    operation.weight = weight;
    char* const begin = static_cast<char*>(flat.data_ptr());
    const int64_t bytes = static_cast<int64_t>(flat.nbytes());
    for (const auto& weak : buffers_) {
      const std::shared_ptr<SharedBuffer> buffer = weak.lock();
      if (!buffer) continue;
      const int64_t offset = begin - buffer->base[local_rank_];
      if (offset < 0 || offset + bytes > buffer->bytes) continue;
      for (char* base : buffer->base) operation.values.push_back(base + offset);
      operation.memory = buffer;
      operation.residency = &*buffer->residency;
      operation.offset = offset;
      return std::make_unique<ShmReduce>(*this, give(flat, std::move(operation)), at::Tensor());
    }
    if (bytes > kStagingBytes || staging_state_->is_awaited) return nullptr;
    // Waits for an operation that this rank gave up and others may still be summing.
    if (!exchange_->is_done(staging_state_->number)) exchange_->wait(staging_state_->number);
    std::memcpy(staging(local_rank_), begin, bytes);
    for (int local_rank = 0; local_rank < num_local_ranks(); ++local_rank)
      operation.values.push_back(staging(local_rank));
    const auto numbers = give(flat, std::move(operation));
    *staging_state_ = {numbers.second, true};
    return std::make_unique<ShmReduce>(*this, numbers, flat);
  }

  // Returns the numbers of the first operation and the last.
  std::pair<uint64_t, uint64_t> give(const at::Tensor& flat, ShmExchange::Operation rest) {
    return recording_collective(title_, tag(), flat, [&] {
      return recording_launch(*group_, ranks(), "allreduce", ++num_begun_, flat.numel(), flat.scalar_type(), [&] {
        const int64_t most = most_of_part(rest), bytes = most * bytes_of(rest.type);
        uint64_t first = 0;
        for (; rest.numel > most; rest.numel -= most) {
          ShmExchange::Operation part = rest;
          part.numel = most;
          const uint64_t number = exchange_->start(std::move(part));
          if (first == 0) first = number;
          rest.offset += bytes;
          for (char*& values : rest.values) values += bytes;
        }
        const uint64_t last = exchange_->start(std::move(rest));
        return std::make_pair(first == 0 ? last : first, last);
      });
    });
  }

  // Returns the most values of a part of an operation.
  int64_t most_of_part(const ShmExchange::Operation& whole) const {
    const bool goes_whole = whole.type != ElementType::kFloat32 || whole.exchange != Exchange::kAllReduce;
    const int64_t unit = num_hosts_ == 1 || goes_whole ? 0 : torch_->divides_at(num_hosts_);
    if (unit == 0) return whole.numel;
    const int64_t units = (whole.numel + unit - 1) / unit;
    return std::max<int64_t>((units + kMostParts - 1) / kMostParts, 1) * unit;
  }

  // Returns the values of all ranks. Every rank of the group must call it.
  template <class T>
  std::vector<T> gather(const T& mine) {
    std::vector<at::Tensor> input = {at::empty({sizeof(T)}, at::kByte)};
    std::memcpy(input[0].data_ptr(), &mine, sizeof(mine));
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int rank = 0; rank < size(); ++rank) outputs[0].push_back(at::empty_like(input[0]));
    group_->allgather(outputs, input)->wait();
    return unpack<T>(outputs[0]);
  }

  // rows: by rank, sizeof(T) bytes each.
  template <class T>
  static std::vector<T> unpack(const std::vector<at::Tensor>& rows) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(rows.size());
    for (size_t rank = 0; rank < rows.size(); ++rank) std::memcpy(&all[rank], rows[rank].data_ptr(), sizeof(T));
    return all;
  }

  // As gather(), through shared memory if all ranks are on this host: the process group takes several times as long.
  template <class T>
  std::vector<T> gather_over_memory(const T& mine) {
    static_assert(sizeof(T) % sizeof(int32_t) == 0);
    constexpr int64_t kWords = sizeof(T) / sizeof(int32_t);
    const bool fits = size() * static_cast<int64_t>(sizeof(T)) <= kStagingBytes;
    if (!exchange_ || num_local_ranks() < size() || !fits) return gather(mine);
    // Sums rows of which all but this rank's are zero.
    const at::Tensor rows = at::zeros({size(), kWords}, at::kInt);
    std::memcpy(rows[rank()].data_ptr(), &mine, sizeof(mine));
    std::unique_ptr<PendingReduce> sum = start_shared(rows.view(-1), 1);
    if (!sum) return gather(mine);
    sum->wait();
    return unpack<T>(rows.unbind());
  }

  // Returns true if no rank reports an error. Else why_not_ names the rank and its error.
  template <class T>
  bool agree(const std::vector<T>& all) {
    for (int rank = 0; rank < size(); ++rank) {
      if (all[rank].error[0] == '\0') continue;
      why_not_ = text(ranks().name(rank), ": ", all[rank].error);
      return false;
    }
    return true;
  }

  // Allocates and maps memory of every rank of this host. Returns null if that fails on any rank of any host. Every
  // rank must call it.
  std::shared_ptr<SharedBuffer> share(int64_t bytes) {
    auto buffer = std::make_shared<SharedBuffer>();
    buffer->bytes = bytes;
    Announcement mine;
    const auto attempt = [](auto& outcome, auto&& what) {
      try {
        what();
      } catch (const std::exception& error) {
        std::strncpy(outcome.error, error.what(), sizeof(outcome.error) - 1);
      }
    };
    attempt(mine, [&] {
      buffer->own = std::make_shared<ShmSegment>(ShmSegment::create(bytes));
      mine.address = buffer->own->address();
    });
    const std::vector<Announcement> all = gather_over_memory(mine);
    if (!agree(all)) return nullptr;
    StatusAndCores opened;
    attempt(opened, [&] {
      if (processes_.empty()) watch(all);
      for (int local_rank = 0; local_rank < num_local_ranks(); ++local_rank) {
        const ShmSegment::Address& other = all[host_[local_rank]].address;
        if (other.bytes != bytes) {
          throw EnvironmentError(
              text("allocates ", bytes, " bytes where ", ranks().name(host_[local_rank]), " allocates ", other.bytes));
        }
        if (local_rank != local_rank_) buffer->others.push_back(ShmSegment::open(other));
        buffer->base.push_back(local_rank == local_rank_ ? buffer->own->data() : buffer->others.back().data());
      }
    });
    if (!exchange_) {  // the first allocation
      opened.cores = cores_of_this_thread();
      const std::vector<StatusAndCores> all_opened = gather(opened);
      if (!agree(all_opened)) return nullptr;
      std::vector<CoreSet> cores;
      for (int rank : host_) cores.push_back(all_opened[rank].cores);
      spins_ = is_a_core_for_each(cores);
    } else if (!agree(gather_over_memory<PeerStatus>(opened))) {
      return nullptr;
    }
    std::vector<char*> others;
    for (const ShmSegment& other : buffer->others) others.push_back(other.data());
    buffer->residency.emplace(std::move(others), bytes);
    return buffer;
  }

  // Comes before their memory is opened: the right nonce in that memory then proves that the process is the same.
  void watch(const std::vector<Announcement>& all) {
    for (int rank : host_) processes_.emplace_back(all[rank].address.pid);
  }

  std::shared_ptr<Comm> torch_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<int> host_;         // the ranks of this host, by local rank
  std::vector<int> host_of_;      // the number of each rank's host, in the order of their first ranks
  std::vector<int> number_here_;  // the local rank of each rank; -1: on another host
  int num_hosts_ = 1;
  int local_rank_ = 0;
  std::shared_ptr<Comm> leaders_;  // null with one host and on ranks that are not their host's first
  std::unique_ptr<TorchLink> link_;
  std::vector<PeerProcess> processes_;  // [local ranks]
  // The exchange's state, in local rank 0's part, and every rank's staging area.
  std::shared_ptr<SharedBuffer> shared_state_;
  int64_t staging_offset_ = 0;
  const std::shared_ptr<Staging> staging_state_ = std::make_shared<Staging>();
  std::vector<std::weak_ptr<SharedBuffer>> buffers_;  // exist as long as tensors in them, or operations on these
  int64_t num_begun_ = 0;
  std::string title_;  // names its all-reduces in profiles
  bool spins_ = false;
  const bool in_tree_;
  std::optional<ShmExchange> exchange_;
  std::string why_not_;
};

}  // namespace

std::unique_ptr<Comm> make_shm_comm(const ShmOptions& options) { return std::make_unique<ShmComm>(options); }

}  // namespace drivetrain::ddp
