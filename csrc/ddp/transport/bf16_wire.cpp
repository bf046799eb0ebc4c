// Implements the transport that sends bfloat16 and sums in float32; transport.h bounds its error.
//
// A tensor's own memory is the buffer of its transfer. The rounded values fill the lower half, and received values go
// to the upper half, or to new memory where they do not fit. A first all-to-all brings every rank all ranks' values of
// its piece. The rank writes their sum over each of them, and a second all-to-all in reverse spreads the sums.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>

#include "base/check.h"
#include "ddp/transport/rank_sum.h"
#include "ddp/transport/torch_group.h"

namespace drivetrain::ddp {
namespace {

constexpr int64_t kWireBytes = bytes_of(ElementType::kBFloat16);
// Limits the bytes that one rank sends to another at once. gloo sends a large message first one way, then the other:
// 6 MiB in 16 pieces take half the time on a wire of 1 Gbit/s. One piece is summed while the next is on its way.
constexpr int64_t kMessageBytes = 384 << 10;

// Converts values. `from` and `to` may be the same memory where SumJob allows it.
void convert(char* from, ElementType from_type, char* to, ElementType to_type, int64_t begin, int64_t end) {
  sum_range({from_type, to_type, &from, 1, &to, 1, begin, end, 1});
}

// One transfer of a tensor, or of a part of one.
class Transfer {
 public:
  Transfer(const at::Tensor& flat, int rank, int size) : flat_(flat), size_(size) {
    const int64_t numel = flat.numel();
    const auto begin_of = [&](int piece) { return numel * piece / size; };
    for (int piece = 0; piece < size; ++piece) pieces_.push_back((begin_of(piece + 1) - begin_of(piece)) * kWireBytes);
    own_.assign(size, pieces_[rank]);
    const at::Tensor bytes = flat.view(at::kByte);
    const int64_t half = numel * kWireBytes, received = size * pieces_[rank];
    lower_ = bytes.narrow(0, 0, half);
    received_ = received <= half ? bytes.narrow(0, half, received) : at::empty({received}, bytes.options());
    char* const data = values();
    convert(data, ElementType::kFloat32, data, ElementType::kBFloat16, 0, numel);
  }

  std::unique_ptr<TorchReduce> start_there(TorchComm& comm) {
    return comm.start_all_to_all(received_, lower_, own_, pieces_);
  }

  void sum() {
    std::vector<char*> pieces;
    for (int rank = 0; rank < size_; ++rank) {
      pieces.push_back(static_cast<char*>(received_.data_ptr()) + rank * own_[rank]);
    }
    constexpr ElementType kType = ElementType::kBFloat16;
    sum_range({kType, kType, pieces.data(), size_, pieces.data(), size_, 0, own_[0] / kWireBytes, 1});
  }

  std::unique_ptr<TorchReduce> start_back(TorchComm& comm) {
    return comm.start_all_to_all(lower_, received_, pieces_, own_);
  }

  void widen() {
    // Goes from the end, and never writes over values that are still to be read.
    int64_t begin = 0;
    for (int64_t end = flat_.numel(); end > 0; end = begin) {
      begin = end > 1 ? (end + 1) / 2 : 0;
      convert(values(), ElementType::kBFloat16, values(), ElementType::kFloat32, begin, end);
    }
  }

  // The chain guards the following.
  std::unique_ptr<TorchReduce> there;
  std::unique_ptr<TorchReduce> back;  // null until summed
  std::string failure;

 private:
  char* values() const { return static_cast<char*>(flat_.data_ptr()); }

  at::Tensor flat_;  // float32
  int size_;
  std::vector<int64_t> pieces_;  // bytes on the wire, [size]
  std::vector<int64_t> own_;     // this rank's piece, [size] times
  at::Tensor lower_, received_;  // bytes
};

// Sums arrived transfers and sends them back, in the order of start() on every rank, whatever order they arrived in.
// gloo's threads do this, so that it goes on while backward runs. A waiting rank does it, too.
class Chain {
 public:
  explicit Chain(TorchComm& returning) : returning_(&returning) {}

  void check() {
    const std::lock_guard<std::mutex> lock(queue_);
    if (!failure_.empty()) throw EnvironmentError(failure_);
  }

  void start(const std::shared_ptr<Transfer>& transfer, TorchComm& comm) {
    const std::lock_guard<std::mutex> one_at_a_time(starting_);
    // The queue's lock is free here. Where torch checks collectives, this call waits for other ranks, and they wait for
    // what this rank sends back.
    transfer->there = transfer->start_there(comm);
    const std::lock_guard<std::mutex> lock(queue_);
    waiting_.push_back(transfer);
  }

  void advance() {
    std::vector<std::shared_ptr<Transfer>> sent;  // freed after the locks: the last owner may need the GIL
    const std::lock_guard<std::mutex> one_at_a_time(advancing_);
    while (const std::shared_ptr<Transfer> transfer = arrived()) {
      sent.push_back(transfer);
      std::unique_ptr<TorchReduce> back;
      std::string failure = failure_;
      try {
        if (const auto future = transfer->there->future(); failure.empty() && future->hasError()) {
          failure = future->tryRetrieveErrorMessage();
        }
        if (failure.empty() && !returning_) failure = "the transport was deleted before its values had arrived";
        if (failure.empty()) {
          transfer->sum();
          back = transfer->start_back(*returning_);
        }
      } catch (const std::exception& error) {
        failure = error.what();
      }
      const std::lock_guard<std::mutex> lock(queue_);
      transfer->back = std::move(back);
      transfer->failure = failure_ = failure;
      waiting_.pop_front();
    }
  }

  // Returns what must arrive before this transfer is sent back; null: it is on its way back, or has failed.
  c10::intrusive_ptr<c10::ivalue::Future> missing(const Transfer& transfer) {
    const std::lock_guard<std::mutex> lock(queue_);
    if (transfer.back || !transfer.failure.empty()) return nullptr;
    return waiting_.front()->there->future();
  }

  bool is_done(const Transfer& transfer) {
    const std::lock_guard<std::mutex> lock(queue_);
    return !transfer.failure.empty() || (transfer.back && transfer.back->is_done());
  }

  void close() {
    const std::lock_guard<std::mutex> one_at_a_time(advancing_);
    returning_ = nullptr;
  }

 private:
  // Returns the next transfer to be summed. After a failure, returns any that waits.
  std::shared_ptr<Transfer> arrived() {
    const std::lock_guard<std::mutex> lock(queue_);
    if (waiting_.empty()) return nullptr;
    return !failure_.empty() || waiting_.front()->there->future()->completed() ? waiting_.front() : nullptr;
  }

  // Mutexes are locked in this order. Only the last is always held for moments only.
  std::mutex starting_;
  std::mutex advancing_;
  std::mutex queue_;
  TorchComm* returning_;                           // null once the transport is gone, when gloo may still call back
  std::deque<std::shared_ptr<Transfer>> waiting_;  // transfers whose values have not arrived
  std::string failure_;  // set: the ranks' orders may differ, and every later transfer fails, too
};

class WireReduce final : public PendingReduce {
 public:
  WireReduce(std::shared_ptr<Chain> chain, std::deque<std::shared_ptr<Transfer>> transfers)
      : chain_(std::move(chain)), transfers_(std::move(transfers)) {}

  bool is_done() override {
    for (const auto& transfer : transfers_) {
      if (!chain_->is_done(*transfer)) return false;
    }
    return true;
  }

  // The process group ends its futures within its timeout.
  void wait() override {
    while (!wait_for(std::chrono::hours(1))) {
    }
  }

  bool wait_for(std::chrono::milliseconds limit) override {
    for (; !transfers_.empty(); transfers_.pop_front()) {
      Transfer& transfer = *transfers_.front();
      while (const auto future = chain_->missing(transfer)) {
        if (!ddp::wait_for(*future, limit)) return false;
        chain_->advance();
      }
      if (!transfer.failure.empty()) throw EnvironmentError(transfer.failure);
      if (!transfer.back->wait_for(limit)) return false;
      transfer.widen();
    }
    return true;
  }

 private:
  std::shared_ptr<Chain> chain_;
  std::deque<std::shared_ptr<Transfer>> transfers_;  // those that are not widened yet
};

class WireComm final : public Comm {
 public:
  WireComm(const std::string& group_name, const std::string& returning, const Ranks& ranks)
      : Comm(ranks),
        group_(c10d::resolve_process_group(group_name), c10::DeviceType::CPU, ranks),
        returning_(c10d::resolve_process_group(returning), c10::DeviceType::CPU, ranks),
        chain_(std::make_shared<Chain>(returning_)) {
    DT_INVARIANT(group_.size() == returning_.size() && group_.rank() == returning_.rank());
  }

  ~WireComm() override { chain_->close(); }

  int size() const override { return group_.size(); }
  int rank() const override { return group_.rank(); }
  std::string name() const override { return group_.name(); }
  at::Tensor allocate(int64_t bytes, c10::Device device) override { return group_.allocate(bytes, device); }

  std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat) override {
    if (flat.layout() != at::kStrided || flat.scalar_type() != at::kFloat || flat.numel() == 0) {
      return group_.start_sum(flat);
    }
    DT_INVARIANT(flat.is_contiguous() && flat.is_cpu());
    chain_->check();
    std::deque<std::shared_ptr<Transfer>> transfers;
    const int64_t numel = flat.numel(), most = kMessageBytes / kWireBytes * size();
    for (int64_t begin = 0; begin < numel; begin += most) {
      auto transfer = std::make_shared<Transfer>(flat.narrow(0, begin, std::min(most, numel - begin)), rank(), size());
      chain_->start(transfer, group_);
      // The callback must not keep a process group alive: its destructor joins the thread that calls back.
      transfer->there->future()->addCallback([weak = std::weak_ptr<Chain>(chain_)](c10::ivalue::Future&) {
        if (const auto chain = weak.lock()) chain->advance();
      });
      transfers.push_back(std::move(transfer));
    }
    return std::make_unique<WireReduce>(chain_, std::move(transfers));
  }

 private:
  TorchComm group_;
  TorchComm returning_;
  std::shared_ptr<Chain> chain_;
};

}  // namespace

std::unique_ptr<Comm> make_wire_comm(const std::string& group_name, const std::string& returning, Ranks ranks) {
  return std::make_unique<WireComm>(group_name, returning, ranks);
}

}  // namespace drivetrain::ddp
