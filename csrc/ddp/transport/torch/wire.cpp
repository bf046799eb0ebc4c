// Implements the transport that rounds float32 values for the wire and sums them in float32; transport.h bounds its
// error.
//
// A tensor's own memory is the buffer of its transfer. The rounded values fill its lower part, and received values go
// to the upper part, or to new memory where they do not fit. A first all-to-all brings every rank all ranks' values of
// its piece. The rank writes their sum over each of them, and a second all-to-all in reverse spreads the sums. Exact
// values stay where they are.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>

#include "base/check.h"
#include "base/without_gil.h"
#include "ddp/transport/torch/scatter.h"
#include "ddp/transport/torch/torch_group.h"
#include "ddp/transport/torch/wire_format.h"

namespace drivetrain::ddp {
namespace {

// One transfer of a tensor, or of a part of one.
class Transfer {
 public:
  // errors: the errors of the memory in which the tensor lies; null: none are carried.
  Transfer(const at::Tensor& flat, WireFormat format, CarriedErrors* errors, int rank, int size)
      : flat_(flat), format_(format), type_(*element_type(flat.scalar_type())) {
    const int64_t numel = flat.numel();
    const auto begin_of = [&](int piece) { return piece_begin(numel, piece, size); };
    int64_t on_wire = 0;
    for (int piece = 0; piece < size; ++piece) {
      pieces_.push_back({begin_of(piece), begin_of(piece + 1) - begin_of(piece), on_wire});
      const int64_t own = pieces_.back().numel;
      counts_.push_back(is_exact() ? own * bytes_of(type_) : wire_bytes(format, own));
      on_wire += counts_.back();
    }
    own_numel_ = pieces_[rank].numel;
    own_counts_.assign(size, counts_[rank]);
    if (errors != nullptr) errors_ = errors->of(flat.const_data_ptr<float>(), numel, own_numel_);

    const at::Tensor bytes = flat.view(at::kByte);
    const int64_t received = size * counts_[rank], above = bytes.numel() - on_wire;
    lower_ = bytes.narrow(0, 0, on_wire);
    received_ = received <= above ? bytes.narrow(0, on_wire, received) : at::empty({received}, bytes.options());
    for (size_t i = 0; i < pieces_.size() && !is_exact(); ++i) {
      const Piece& piece = pieces_[i];
      float* const rest = errors_ ? errors_->of_values.data() + piece.begin : nullptr;
      encode(format, value(piece.begin), rest, piece.numel, wire(piece));
    }
  }

  std::unique_ptr<TorchReduce> start_there(TorchComm& comm) {
    return comm.start_all_to_all(received_, lower_, own_counts_, counts_);
  }

  void sum() {
    std::vector<char*> inputs;
    for (size_t rank = 0; rank < own_counts_.size(); ++rank) {
      inputs.push_back(static_cast<char*>(received_.data_ptr()) + rank * own_counts_[rank]);
    }
    const int count = static_cast<int>(inputs.size());
    if (is_exact()) {
      sum_range({type_, type_, inputs.data(), count, inputs.data(), count, 0, own_numel_, 1, /*in_tree=*/true});
      return;
    }
    ddp::sum(format_, inputs, count, errors_ ? errors_->of_sums.data() : nullptr, own_numel_);
  }

  std::unique_ptr<TorchReduce> start_back(TorchComm& comm) {
    return comm.start_all_to_all(lower_, received_, counts_, own_counts_);
  }

  // Goes from the end, and never writes over values that are still to be read.
  void widen() {
    if (is_exact()) return;
    for (auto piece = pieces_.rbegin(); piece != pieces_.rend(); ++piece) {
      decode(format_, wire(*piece), piece->numel, value(piece->begin));
    }
  }

  // The chain guards the following.
  std::unique_ptr<TorchReduce> there;
  std::unique_ptr<TorchReduce> back;  // null until summed
  std::string failure;

 private:
  // The values that one rank sums.
  struct Piece {
    int64_t begin;
    int64_t numel;
    int64_t on_wire;  // its first byte in lower_
  };

  bool is_exact() const { return format_ == WireFormat::kExact; }
  char* value(int64_t index) const { return static_cast<char*>(flat_.data_ptr()) + index * sizeof(float); }
  char* wire(const Piece& piece) const { return static_cast<char*>(flat_.data_ptr()) + piece.on_wire; }

  at::Tensor flat_;  // float32, unless the format is exact
  WireFormat format_;
  ElementType type_;
  std::vector<Piece> pieces_;        // [size]
  std::vector<int64_t> counts_;      // their bytes on the wire, [size]
  std::vector<int64_t> own_counts_;  // the counts of this rank's piece, [size] times
  int64_t own_numel_;
  std::shared_ptr<TransferErrors> errors_;  // null: none are carried
  at::Tensor lower_, received_;             // bytes
};

// Sums arrived transfers and sends them back, in the order of start() on every rank, whatever order they arrived in.
// gloo's threads do this, so that it goes on while backward runs. A waiting rank does it as well.
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
    // the sums that this rank sends back.
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
  std::string failure_;  // set: the ranks' orders may differ, and every later transfer fails as well
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
  WireComm(const std::string& group_name, const std::string& returning, WireFormat format, const Ranks& ranks)
      : Comm(ranks),
        format_(format),
        group_(c10d::resolve_process_group(group_name), "gloo", ranks),
        returning_(c10d::resolve_process_group(returning), "gloo", ranks),
        chain_(std::make_shared<Chain>(returning_)) {
    DT_INVARIANT(group_.size() == returning_.size() && group_.rank() == returning_.rank());
  }

  ~WireComm() override {
    without_gil([this] { chain_->close(); });  // a sum may be in progress, or a check that waits for other ranks
  }

  int size() const override { return group_.size(); }
  int rank() const override { return group_.rank(); }
  std::string name() const override { return group_.name(); }
  at::Tensor allocate(int64_t bytes, c10::Device device) override { return group_.allocate(bytes, device); }

  bool carries_errors() const override { return ddp::carries_errors(format_); }

  std::shared_ptr<void> carry_errors(const at::Tensor& memory) override {
    if (!carries_errors() || !memory.is_cpu()) return nullptr;
    auto errors = std::make_shared<CarriedErrors>(memory.const_data_ptr(), memory.nbytes());
    const std::lock_guard<std::mutex> lock(carried_mutex_);
    std::erase_if(carried_, [](const auto& other) { return other.expired(); });
    carried_.push_back(errors);
    return errors;
  }

  // Each transfer has as many values as these, and rounds them by itself.
  int64_t divides_at(int num_ranks) const override { return most_values(format_) * num_ranks; }

  void set_returning(const std::string& group_name) override {
    group_.set_returning(group_name);
    scatter_returning_ = std::make_shared<TorchComm>(c10d::resolve_process_group(group_name), "gloo", ranks());
  }

  std::unique_ptr<PendingReduce> start_scatter(const at::Tensor& flat,
                                               const std::shared_ptr<const RankRanges>& ranges) override {
    if (!is_taken(flat)) return group_.start_scatter(flat, ranges);
    DT_INVARIANT(flat.is_contiguous() && flat.is_cpu());
    chain_->check();
    std::unique_ptr<PendingReduce> reduce;
    if (format_ == WireFormat::kExact) {
      const ElementType type = *element_type(flat.scalar_type());
      reduce = start_torch_scatter(flat, type, *ranges, group_, scatter_returning_, /*in_tree=*/true);
    } else {
      const std::shared_ptr<CarriedErrors> errors = errors_of(flat);
      reduce = start_wire_scatter(flat, format_, *ranges, errors.get(), group_, scatter_returning_);
    }
    return reduce ? std::move(reduce) : start_sum(flat);
  }

  std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat) override {
    if (!is_taken(flat)) return group_.start_sum(flat);
    DT_INVARIANT(flat.is_contiguous() && flat.is_cpu());
    chain_->check();
    std::deque<std::shared_ptr<Transfer>> transfers;
    const int64_t numel = flat.numel(), most = divides_at(size());
    const std::shared_ptr<CarriedErrors> errors = errors_of(flat);
    for (int64_t begin = 0; begin < numel; begin += most) {
      const at::Tensor part = flat.narrow(0, begin, std::min(most, numel - begin));
      auto transfer = std::make_shared<Transfer>(part, format_, errors.get(), rank(), size());
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
  // Returns false for tensors that travel as they would without this transport.
  bool is_taken(const at::Tensor& flat) const {
    const bool is_exact = format_ == WireFormat::kExact && flat.is_floating_point() && flat.is_cpu();
    return flat.layout() == at::kStrided && (is_exact || flat.scalar_type() == at::kFloat) && flat.numel() > 0;
  }

  // Returns the last that were made for memory with this tensor; null: there are none.
  std::shared_ptr<CarriedErrors> errors_of(const at::Tensor& flat) {
    const std::lock_guard<std::mutex> lock(carried_mutex_);
    for (auto weak = carried_.rbegin(); weak != carried_.rend(); ++weak) {
      const std::shared_ptr<CarriedErrors> errors = weak->lock();
      if (errors && errors->covers(flat.const_data_ptr<float>(), flat.numel())) return errors;
    }
    return nullptr;
  }

  const WireFormat format_;
  TorchComm group_;
  TorchComm returning_;
  std::shared_ptr<Chain> chain_;
  std::shared_ptr<TorchComm> scatter_returning_;  // null: sums of reduce-scatters go to one rank each
  std::mutex carried_mutex_;
  std::vector<std::weak_ptr<CarriedErrors>> carried_;  // by age; their owners end them
};

}  // namespace

std::unique_ptr<Comm> make_wire_comm(const std::string& group_name, const std::string& returning, WireFormat format,
                                     Ranks ranks) {
  return std::make_unique<WireComm>(group_name, returning, format, ranks);
}

}  // namespace drivetrain::ddp
