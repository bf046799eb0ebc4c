// Runs operations in chunks through the shared file; see launch.h.
#include "launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "../fake_cuda/fake_cuda.h"
#include "reduce.h"

namespace fake_nccl {
namespace {

// Finds the functions of tests/fake_cuda if this process runs on it. Otherwise streams are those of fake_cuda.cpp here.
struct Device {
  decltype(&::fake_cuda_enqueue) enqueue = nullptr;
  decltype(&::fake_cuda_view) view = nullptr;

  Device() {
    enqueue = reinterpret_cast<decltype(enqueue)>(::dlsym(RTLD_DEFAULT, "fake_cuda_enqueue"));
    view = reinterpret_cast<decltype(view)>(::dlsym(RTLD_DEFAULT, "fake_cuda_view"));
  }
  const char* at(const void* address) const { return static_cast<const char*>(view ? view(address) : address); }
  char* at(void* address) const { return static_cast<char*>(view ? view(address) : address); }
};

const Device& device() {
  static const Device found;
  return found;
}

enum class State { kAgain, kDone };

// The state of one operation.
class Progress {
 public:
  Progress(ncclComm& comm, const Operation& operation) : comm_(comm), operation_(operation) {
    const bool has_parts = operation.kind == Kind::kReduceScatter || operation.kind == Kind::kAllToAll;
    parts_ = has_parts ? comm.size : 1;
    element_ = bytes_of(operation.type);
    per_chunk_ = (operation.is_between_two() ? kMailChunk : kChunk) / element_;
    chunks_ = (operation.count + per_chunk_ - 1) / per_chunk_;
    if (operation.is_between_two())
      chunks_ = std::max<size_t>(chunks_, 1);  // an empty message needs its other side too
    errs_ = fault(operation.text() + " errors");
    hangs_ = errs_ || fault(operation.text() + " hangs");
  }

  const Operation& operation() const { return operation_; }

  State step() {
    if (hangs_) {
      if (errs_) comm_.fail(ncclRemoteError, "fake NCCL was asked to fail");
      return State::kAgain;
    }
    return operation_.is_between_two() ? step_between_two() : step_collective();
  }

 private:
  enum class Phase { kPut, kTake, kLeave };

  State step_collective() {
    while (part_ < parts_ && chunks_ > 0) {
      switch (phase_) {
        case Phase::kPut:
          put();
          arrive(Phase::kTake);
          break;
        case Phase::kTake:
          if (!have_all_arrived()) return State::kAgain;
          if (!agree()) {
            comm_.fail(ncclInvalidUsage, "ranks started different operations or groups");
            return State::kAgain;
          }
          take();
          arrive(Phase::kLeave);
          break;
        case Phase::kLeave:
          if (!have_all_arrived()) return State::kAgain;
          phase_ = Phase::kPut;
          if (++chunk_ < chunks_) break;
          chunk_ = 0;
          ++part_;
      }
    }
    return State::kDone;
  }

  // A send ends only once all of it is received, as NCCL need not hold any.
  State step_between_two() {
    const bool sends = operation_.kind == Kind::kSend;
    Mail& mail =
        sends ? comm_.board->mail[comm_.rank][operation_.peer] : comm_.board->mail[operation_.peer][comm_.rank];
    for (; chunk_ < chunks_; ++chunk_) {
      const bool is_full = mail.sent > mail.taken;
      if (is_full == sends) return State::kAgain;
      const int64_t what[3] = {static_cast<int64_t>(operation_.count), operation_.type, static_cast<int64_t>(chunk_)};
      if (sends) {
        std::memcpy(mail.what, what, sizeof(what));
        std::memcpy(mail.values, from(), bytes());
        ++mail.sent;
      } else if (std::memcmp(mail.what, what, sizeof(what)) != 0) {
        comm_.fail(ncclInvalidUsage, operation_.text() + " got a message of another count or type");
        return State::kAgain;
      } else {
        std::memcpy(to(), mail.values, bytes());
        ++mail.taken;
      }
    }
    return sends && mail.sent > mail.taken ? State::kAgain : State::kDone;
  }

  size_t count() const { return std::min(per_chunk_, operation_.count - chunk_ * per_chunk_); }
  size_t bytes() const { return count() * element_; }
  const char* from(size_t part = 0) const {
    return device().at(operation_.from) + (part * operation_.count + chunk_ * per_chunk_) * element_;
  }
  char* to(size_t part = 0) const {
    return device().at(operation_.to) + (part * operation_.count + chunk_ * per_chunk_) * element_;
  }
  char* slot(int rank) const { return comm_.board->values[rank]; }

  void put() {
    const int64_t what[7] = {static_cast<int64_t>(operation_.kind),
                             static_cast<int64_t>(operation_.count),
                             operation_.type,
                             operation_.op,
                             operation_.peer,
                             static_cast<int64_t>(operation_.group),
                             static_cast<int64_t>(part_ * chunks_ + chunk_)};
    std::memcpy(comm_.board->what[comm_.rank], what, sizeof(what));
    if (operation_.kind == Kind::kBroadcast && operation_.peer != comm_.rank) return;
    std::memcpy(slot(comm_.rank), from(part_), bytes());
  }

  bool agree() const {
    for (int rank = 0; rank < comm_.size; ++rank) {
      if (std::memcmp(comm_.board->what[rank], comm_.board->what[comm_.rank], sizeof(Board::what[0])) != 0)
        return false;
    }
    return true;
  }

  void take() {
    const bool is_mine = static_cast<int>(part_) == comm_.rank, is_root = operation_.peer == comm_.rank;
    switch (operation_.kind) {
      case Kind::kAllReduce:
        return reduce_slots();
      case Kind::kReduce:
        if (is_root) reduce_slots();
        return;
      case Kind::kReduceScatter:
        if (is_mine) reduce_slots();
        return;
      case Kind::kBroadcast:
        std::memcpy(to(), slot(operation_.peer), bytes());
        return;
      case Kind::kAllGather:
        for (int rank = 0; rank < comm_.size; ++rank) std::memcpy(to(rank), slot(rank), bytes());
        return;
      default:  // kAllToAll
        for (int rank = 0; is_mine && rank < comm_.size; ++rank) std::memcpy(to(rank), slot(rank), bytes());
    }
  }

  void reduce_slots() {
    std::vector<const char*> parts;
    for (int rank = 0; rank < comm_.size; ++rank) parts.push_back(slot(rank));
    reduce(parts, to(), count(), operation_.type, operation_.op);
  }

  void arrive(Phase next) {
    phase_ = next;
    ++comm_.barriers;
    ++comm_.board->arrived;
  }
  bool have_all_arrived() const { return comm_.board->arrived >= comm_.barriers * comm_.size; }

  ncclComm& comm_;
  const Operation operation_;
  size_t parts_ = 1, element_ = 1, per_chunk_ = 1, chunks_ = 0;
  bool errs_ = false, hangs_ = false;
  size_t part_ = 0, chunk_ = 0;
  Phase phase_ = Phase::kPut;
};

// A group on its stream. A captured group runs once per replay of its graph.
class Launch {
 public:
  Launch(std::shared_ptr<ncclComm> comm, std::vector<Operation> operations, bool is_captured)
      : comm_(std::move(comm)), operations_(std::move(operations)), is_captured_(is_captured) {
    const auto is_in_window = [this](const Operation& operation) { return comm_->is_in_window(operation.from); };
    ignores_abort_ = fault("abort hangs") ||
                     (!comm_->windows_can_abort && std::any_of(operations_.begin(), operations_.end(), is_in_window));
    const std::lock_guard<std::mutex> lock(comm_->turn_mutex);
    if (!is_captured_) number_ = ++comm_->launched;
  }

  State step() {
    if (comm_->aborted && !ignores_abort_) return end();
    if (!is_running_ && !begin()) return State::kAgain;
    // Sends and receives advance together. Their order in the group does not matter.
    bool is_done = true;
    for (size_t i = 0; i < between_two_.size(); ++i) is_done = step_between_two(i) && is_done;
    while (is_done && next_ < collectives_.size()) {
      is_done = collectives_[next_].step() == State::kDone;
      if (is_done) ++next_;
    }
    if (is_done && !has_data_) {
      has_data_ = true;
      size_t bytes = 0;
      for (const Operation& operation : operations_) bytes += operation.count * bytes_of(operation.type);
      arrives_ = Clock::now() + time_on_link(bytes);
    }
    if (is_done && Clock::now() >= arrives_) return end();
    comm_->look_at_links();
    if (Clock::now() > deadline_) {
      comm_->fail(ncclInternalError, "fake NCCL waited " + std::to_string(longest_wait().count()) +
                                         " s for the peers of " + operations_[0].text());
      return end();
    }
    return State::kAgain;
  }

 private:
  bool begin() {
    {
      const std::lock_guard<std::mutex> lock(comm_->turn_mutex);
      const bool is_next = is_captured_ || comm_->ended + 1 == number_;
      if (comm_->running != nullptr || !is_next) return false;
      comm_->running = this;
    }
    is_running_ = true;
    has_data_ = false;
    deadline_ = Clock::now() + longest_wait();
    next_ = 0;
    between_two_.clear();
    collectives_.clear();
    for (const Operation& operation : operations_) {
      (operation.is_between_two() ? between_two_ : collectives_).emplace_back(*comm_, operation);
    }
    have_ended_.assign(between_two_.size(), false);
    return true;
  }

  // Advances one send or receive. Those of one kind with the same peer run one after another.
  bool step_between_two(size_t index) {
    if (have_ended_[index]) return true;
    const Operation& operation = between_two_[index].operation();
    for (size_t i = 0; i < index; ++i) {
      const Operation& other = between_two_[i].operation();
      if (!have_ended_[i] && other.kind == operation.kind && other.peer == operation.peer) return false;
    }
    have_ended_[index] = between_two_[index].step() == State::kDone;
    return have_ended_[index];
  }

  State end() {
    const std::lock_guard<std::mutex> lock(comm_->turn_mutex);
    if (comm_->running == this) comm_->running = nullptr;
    if (!is_captured_) comm_->ended = std::max(comm_->ended, number_);
    is_running_ = false;
    return State::kDone;
  }

  const std::shared_ptr<ncclComm> comm_;
  const std::vector<Operation> operations_;
  const bool is_captured_;
  bool ignores_abort_ = false;
  int64_t number_ = 0;
  bool is_running_ = false;
  bool has_data_ = false;
  Clock::time_point deadline_, arrives_;
  std::vector<Progress> between_two_, collectives_;
  std::vector<bool> have_ended_;  // for each of `between_two_`
  size_t next_ = 0;
};

void add_ranges(const ncclComm& comm, const Operation& operation, std::vector<fake_cuda_range>& ranges) {
  const size_t bytes = operation.count * bytes_of(operation.type), all = bytes * comm.size;
  const bool reads_all = operation.kind == Kind::kReduceScatter || operation.kind == Kind::kAllToAll;
  const bool writes_all = operation.kind == Kind::kAllGather || operation.kind == Kind::kAllToAll;
  const bool is_root = operation.peer == comm.rank;
  const bool reads = operation.kind != Kind::kRecv && (operation.kind != Kind::kBroadcast || is_root);
  const bool writes = operation.kind != Kind::kSend && (operation.kind != Kind::kReduce || is_root);
  if (reads) ranges.push_back({operation.from, reads_all ? all : bytes, 0});
  if (writes) ranges.push_back({operation.to, writes_all ? all : bytes, 1});
}

const char* name_of(Kind kind, ncclRedOp_t op) {
  switch (kind) {
    case Kind::kBroadcast:
      return "broadcast ";
    case Kind::kReduce:
      return "reduce ";
    case Kind::kAllGather:
      return "gather ";
    case Kind::kReduceScatter:
      return "scatter ";
    case Kind::kAllToAll:
      return "exchange ";
    case Kind::kSend:
      return "send ";
    case Kind::kRecv:
      return "receive ";
    default:
      return op == ncclAvg ? "mean " : op == ncclSum ? "sum " : "extreme ";
  }
}

}  // namespace

std::string Operation::text() const {
  const bool is_small = type == ncclFloat16 || type == ncclBfloat16;
  const char* const name = type == ncclFloat32   ? "float "
                           : type == ncclFloat64 ? "double "
                           : is_small            ? "half "
                                                 : "int ";
  return std::string(name) + name_of(kind, op) + std::to_string(count);
}

void launch(ncclComm& comm, std::vector<Operation> operations, cudaStream_t stream) {
  std::stable_sort(operations.begin(), operations.end(),
                   [](const Operation& a, const Operation& b) { return a.count > b.count; });
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &capture);
  const bool is_captured = capture != cudaStreamCaptureStatusNone;
  std::vector<fake_cuda_range> ranges;
  for (const Operation& operation : operations) add_ranges(comm, operation, ranges);
  const std::string name = "NCCL: " + operations[0].text();
  auto made = std::make_unique<Launch>(comm.self, std::move(operations), is_captured);
  if (device().enqueue != nullptr) {
    const auto step = [](void* context) -> int {
      return static_cast<Launch*>(context)->step() == State::kDone ? FAKE_CUDA_DONE : FAKE_CUDA_AGAIN;
    };
    const auto release = [](void* context) { delete static_cast<Launch*>(context); };
    device().enqueue(stream, name.c_str(), step, made.release(), release, ranges.data(), ranges.size());
    return;
  }
  cudaLaunchHostFunc(
      stream,
      [](void* context) {
        const std::unique_ptr<Launch> launched(static_cast<Launch*>(context));
        while (launched->step() == State::kAgain) rest();
      },
      made.release());
}

}  // namespace fake_nccl
