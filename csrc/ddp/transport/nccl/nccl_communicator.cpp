// Implements the NCCL communicator: bootstrap, groups, registered memory and the polling thread.
#include "ddp/transport/nccl/nccl_communicator.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/check_cuda.h"

namespace drivetrain::ddp {
namespace {

using Clock = std::chrono::steady_clock;

// The polling interval is short against any timeout and long against the cost of a poll.
constexpr std::chrono::milliseconds kLook(20);
// The destructor aborts after this time, and gives up an abort after as much again.
constexpr std::chrono::seconds kLongestEnd(5);
// A wait for NCCL's threads first does not sleep, as most calls take microseconds.
constexpr std::chrono::milliseconds kStateSpin(1);
constexpr std::chrono::microseconds kPause(200);

// See NcclCommunicator::memory_bytes().
std::atomic<int64_t> bytes_now{0};
std::atomic<int64_t> most_bytes{0};

double seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

void pause(Clock::time_point since) {
  if (Clock::now() - since < kStateSpin) return std::this_thread::yield();
  std::this_thread::sleep_for(kPause);
}

// A query leaves cudaErrorNotReady behind, which the next check of a kernel's launch would report.
cudaError_t state_of(cudaEvent_t event) {
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
  return status;
}

}  // namespace

class NcclCommunicator::Group {
 public:
  Group(std::vector<Collective> collectives, int64_t number, Clock::time_point deadline)
      : collectives_(std::move(collectives)), number_(number), deadline_(deadline) {
    check_cuda(cudaEventCreateWithFlags(&end_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  ~Group() { static_cast<void>(cudaEventDestroy(end_)); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::vector<Collective>& collectives() const { return collectives_; }
  int64_t number() const { return number_; }
  Clock::time_point deadline() const { return deadline_; }
  cudaEvent_t end() const { return end_; }

 private:
  const std::vector<Collective> collectives_;
  const int64_t number_;
  const Clock::time_point deadline_;
  cudaEvent_t end_ = nullptr;
};

// Holds NCCL's communicator and the error that ended it. Every call on it but the abort holds the mutex. Only settle()
// takes long, and it has a limit.
class NcclCommunicator::Handle : public std::enable_shared_from_this<Handle> {
 public:
  explicit Handle(const Options& options) : options_(options) {}

  std::mutex mutex;
  ncclComm_t comm = nullptr;
  std::string error;
  bool is_aborting = false;
  std::vector<Memory*> registered;
  std::vector<std::shared_ptr<void>> left;  // what the device may use until the abort has ended

  const NcclApi& api() const { return *options_.api; }

  void check() const {
    if (!error.empty()) throw EnvironmentError(error);
  }

  // Keeps the first error, and begins to abort all collectives in progress.
  void fail(const std::string& what) noexcept {
    if (error.empty()) error = what;
    abort();
  }

  // NCCL's abort waits for the device, behind some kernels for ever. It runs in a thread that may be given up.
  void abort() noexcept {
    if (comm == nullptr) return;
    is_aborting = true;
    abort_until_ = Clock::now() + kLongestEnd;
    try {
      std::thread([self = shared_from_this(), aborted = std::exchange(comm, nullptr)] {
        static_cast<void>(cudaSetDevice(self->options_.device));
        self->api().ncclCommAbort(aborted);
        std::vector<std::shared_ptr<void>> left;  // outlives the lock: freeing its memory needs the mutex
        const std::lock_guard<std::mutex> lock(self->mutex);
        self->is_aborting = false;
        left.swap(self->left);
      }).detach();
    } catch (const std::system_error& failure) {
      error += text("; nor can it be aborted: ", failure.what());
    }
  }

  // Returns false if the device may go on with aborted collectives. Requires that this thread does not hold the mutex.
  bool has_abort_ended() {
    for (const Clock::time_point begin = Clock::now();; pause(begin)) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!is_aborting || Clock::now() > abort_until_) return !is_aborting;
    }
  }

  // Aborts on failure, where a collective would otherwise go unwatched.
  void check_cuda(cudaError_t status, const char* call) {
    if (status != cudaSuccess) fail(describe_cuda(status, call));
    check();
  }

  std::string describe(ncclResult_t result, const std::string& call) const {
    const std::string detail = api().ncclGetLastError(comm);  // this thread's last error where there is no communicator
    return text(who(), call, " failed with NCCL error ", static_cast<int>(result), " (",
                api().ncclGetErrorString(result), ")", detail.empty() ? "" : ": ", detail);
  }

  std::string describe_abort() const {
    return text(who(), "ncclCommAbort has not ended within ", kLongestEnd.count(),
                " s: the device still executes collectives, and the process keeps their memory. End this process.",
                error.empty() ? "" : " The error before: ", error);
  }

  std::string describe_timeout(const std::string& what) const {
    return text(who(), what, " did not end within the timeout of ", seconds(options_.timeout), " s");
  }

  // Waits for the part of a call that NCCL's threads execute. If it fails or does not end in time, aborts. Success does
  // not prove that the call has ended: ncclCommWindowRegister (2.28.9) returns it at once, and sets the window later.
  // Only ncclCommGetAsyncError() tells.
  void settle(ncclResult_t result, const std::string& call, Clock::time_point deadline) {
    const Clock::time_point begin = Clock::now();
    while (result == ncclSuccess || result == ncclInProgress) {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked = api().ncclCommGetAsyncError(comm, &state);
      result = asked == ncclSuccess ? state : asked;
      if (result == ncclSuccess) return;
      if (result != ncclInProgress) break;
      if (Clock::now() > deadline) {
        fail(describe_timeout(call));
        check();
      }
      pause(begin);
    }
    fail(describe(result, call));
    check();
  }

 private:
  std::string who() const {
    return text("NCCL ", api().version, ", rank ", options_.rank, " of ", options_.size, ": ");
  }

  const Options options_;
  Clock::time_point abort_until_;
};

class NcclCommunicator::Memory {
 public:
  // Returns null if there is too little memory; `result` is NCCL's status.
  static std::shared_ptr<Memory> make(std::shared_ptr<Handle> handle, int device, size_t bytes, ncclResult_t& result) {
    void* data = nullptr;
    result = handle->api().ncclMemAlloc(&data, bytes);
    if (result != ncclSuccess || data == nullptr) {
      static_cast<void>(cudaGetLastError());  // else the next kernel launch reports this failure
      return nullptr;
    }
    return std::shared_ptr<Memory>(new Memory(std::move(handle), device, data, bytes));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Ignores errors: the process then keeps the memory until it ends, as where an aborted collective still uses it.
  ~Memory() {
    const bool is_unused = handle_->has_abort_ended();
    int device = 0;
    const bool known = cudaGetDevice(&device) == cudaSuccess;
    static_cast<void>(cudaSetDevice(device_));
    if (is_unused) static_cast<void>(cudaDeviceSynchronize());  // as cudaFree does: kernels may still use the memory
    {
      const std::lock_guard<std::mutex> lock(handle_->mutex);
      std::erase(handle_->registered, this);
      deregister();
    }
    if (is_unused) {
      handle_->api().ncclMemFree(data);
      bytes_now -= static_cast<int64_t>(bytes);
    }
    if (known) static_cast<void>(cudaSetDevice(device));
  }

  // Requires the handle's mutex. An aborted communicator has deregistered the memory itself.
  void deregister() noexcept {
    if (handle_->comm == nullptr) return;
    const NcclApi& api = handle_->api();
    try {
      if (window != nullptr) {
        handle_->settle(api.ncclCommWindowDeregister(handle_->comm, std::exchange(window, nullptr)),
                        "ncclCommWindowDeregister", Clock::now() + kLongestEnd);
      } else if (registered != nullptr) {
        handle_->settle(api.ncclCommDeregister(handle_->comm, std::exchange(registered, nullptr)), "ncclCommDeregister",
                        Clock::now() + kLongestEnd);
      }
    } catch (const EnvironmentError&) {
      // The handle keeps the error, and the communicator's next call throws it.
    }
  }

  void* const data;
  const size_t bytes;
  ncclWindow_t window = nullptr;
  void* registered = nullptr;

 private:
  Memory(std::shared_ptr<Handle> handle, int device, void* data, size_t bytes)
      : data(data), bytes(bytes), handle_(std::move(handle)), device_(device) {
    const int64_t now = bytes_now += static_cast<int64_t>(bytes);
    int64_t most = most_bytes;
    while (most < now && !most_bytes.compare_exchange_weak(most, now)) {
    }
  }

  const std::shared_ptr<Handle> handle_;
  const int device_;
};

NcclCommunicator::NcclCommunicator(Options options)
    : options_(std::move(options)), handle_(std::make_shared<Handle>(options_)) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  {
    const std::lock_guard<std::mutex> lock(handle_->mutex);
    const ncclResult_t begun =
        options_.api->ncclCommInitRankConfig(&handle_->comm, options_.size, options_.id, options_.rank, &config);
    handle_->settle(begun, "ncclCommInitRankConfig (meeting the other ranks)", Clock::now() + options_.timeout);
  }
  try {
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
    check_cuda(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    watcher_ = std::thread([this] { watch(); });
  } catch (...) {
    end();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() { end(); }

// Aborts only after the limit, as an abort would break collectives that slower ranks still need.
std::string NcclCommunicator::end() noexcept {
  {
    const std::lock_guard<std::mutex> lock(handle_->mutex);
    stopping_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  const Clock::time_point begin = Clock::now(),
                          deadline = begin + std::min<Clock::duration>(kLongestEnd, options_.timeout);
  std::vector<std::shared_ptr<Group>> ended;  // outlives the lock: freeing its memory needs the mutex
  std::unique_lock<std::mutex> lock(handle_->mutex);
  const auto rest = [&](Clock::time_point until) {
    for (take_ended(ended); !under_way_.empty() && Clock::now() < until; take_ended(ended)) pause(begin);
  };
  rest(handle_->is_aborting ? begin : deadline);
  if (under_way_.empty()) {
    // First, as NCCL up to 2.29.3 never frees memory that is a window when its communicator ends.
    for (Memory* memory : handle_->registered) memory->deregister();
    try {
      if (handle_->comm != nullptr) {
        handle_->settle(options_.api->ncclCommFinalize(handle_->comm), "ncclCommFinalize", deadline);
        options_.api->ncclCommDestroy(std::exchange(handle_->comm, nullptr));
      }
    } catch (const EnvironmentError&) {
      // settle() has aborted the communicator. A destructor cannot report the error.
    }
  }
  handle_->abort();
  lock.unlock();
  static_cast<void>(handle_->has_abort_ended());
  lock.lock();
  if (ready_ != nullptr) static_cast<void>(cudaEventDestroy(std::exchange(ready_, nullptr)));
  const auto destroy = [](cudaStream_t stream) { static_cast<void>(cudaStreamDestroy(stream)); };
  std::shared_ptr<CUstream_st> stream;
  if (stream_ != nullptr) stream.reset(std::exchange(stream_, nullptr), destroy);
  if (handle_->is_aborting) {
    handle_->left.insert(handle_->left.end(), under_way_.begin(), under_way_.end());
    handle_->left.push_back(std::move(stream));
    under_way_.clear();
    return handle_->describe_abort();
  }
  rest(Clock::now() + kLongestEnd);  // the device ends what was aborted
  return "";
}

std::shared_ptr<NcclCommunicator::Group> NcclCommunicator::start(std::vector<Collective> collectives,
                                                                 cudaStream_t stream) {
  const NcclApi& api = *options_.api;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) {
    throw UnsupportedError(
        "transport 'nccl' cannot be captured into a CUDA graph: use transport='torch', or keep backward out of the "
        "graph.");
  }
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  std::shared_ptr<Group> group;  // outlives the lock: freeing its memory, should a call below throw, needs the mutex
  const std::lock_guard<std::mutex> lock(handle_->mutex);
  handle_->check();
  group = std::make_shared<Group>(std::move(collectives), num_groups_ + 1, deadline);
  handle_->settle(ncclSuccess, "a collective before", deadline);

  handle_->check_cuda(cudaEventRecord(ready_, stream), "cudaEventRecord");
  handle_->check_cuda(cudaStreamWaitEvent(stream_, ready_, 0), "cudaStreamWaitEvent");
  ncclResult_t result = api.ncclGroupStart();
  const char* call = "ncclGroupStart";
  for (const Collective& collective : group->collectives()) {
    if (result != ncclSuccess && result != ncclInProgress) break;
    result = this->call(collective, call);
  }
  // Ends the group even after an error: it belongs to the thread, and would take the next communicator's calls.
  const ncclResult_t ended = api.ncclGroupEnd();
  const bool is_begun = result == ncclSuccess || result == ncclInProgress;
  handle_->settle(is_begun ? ended : result, call, deadline);
  handle_->check_cuda(cudaEventRecord(group->end(), stream_), "cudaEventRecord");
  ++num_groups_;
  under_way_.push_back(group);
  changed_.notify_all();
  return group;
}

// Requires the handle's mutex.
ncclResult_t NcclCommunicator::call(const Collective& of, const char*& name) const {
  const NcclApi& api = *options_.api;
  switch (of.kind) {
    case Kind::kAllReduce:
      name = "ncclAllReduce";
      return api.ncclAllReduce(of.values, of.values, of.count, of.type, ncclSum, handle_->comm, stream_);
    case Kind::kReduceScatter:
      name = "ncclReduceScatter";
      return api.ncclReduceScatter(of.values, of.own, of.count, of.type, ncclSum, handle_->comm, stream_);
    case Kind::kReduce:
      name = "ncclReduce";
      return api.ncclReduce(of.values, of.values, of.count, of.type, ncclSum, of.root, handle_->comm, stream_);
    case Kind::kAllGather:
      name = "ncclAllGather";
      return api.ncclAllGather(of.own, of.values, of.count, of.type, handle_->comm, stream_);
    case Kind::kBroadcast:
      name = "ncclBroadcast";
      return api.ncclBroadcast(of.values, of.values, of.count, of.type, of.root, handle_->comm, stream_);
    case Kind::kSend:
      name = "ncclSend";
      return api.ncclSend(of.values, of.count, of.type, of.root, handle_->comm, stream_);
    case Kind::kReceive:
      name = "ncclRecv";
      return api.ncclRecv(of.values, of.count, of.type, of.root, handle_->comm, stream_);
  }
  throw InvariantError("unknown kind of collective");
}

void NcclCommunicator::wait(Group& group, cudaStream_t stream) {
  const auto check = [&] {
    const std::lock_guard<std::mutex> lock(handle_->mutex);
    handle_->check();
  };
  check();
  check_cuda(cudaStreamWaitEvent(stream, group.end(), 0), "cudaStreamWaitEvent");
  check();  // the call above blocks where a stream's queue is full
}

void NcclCommunicator::give_up(const std::string& why) {
  const std::lock_guard<std::mutex> lock(handle_->mutex);
  handle_->fail(why);
}

bool NcclCommunicator::is_done(Group& group) {
  const std::lock_guard<std::mutex> lock(handle_->mutex);
  return !handle_->error.empty() || state_of(group.end()) != cudaErrorNotReady;
}

std::shared_ptr<NcclCommunicator::Memory> NcclCommunicator::allocate(size_t bytes,
                                                                     const std::function<void()>& release_cache,
                                                                     std::string& failure) {
  const NcclApi& api = *options_.api;
  if (api.ncclMemAlloc == nullptr || api.ncclMemFree == nullptr) return nullptr;
  ncclResult_t result = ncclSuccess;
  std::shared_ptr<Memory> memory = Memory::make(handle_, options_.device, bytes, result);
  if (!memory) {
    release_cache();
    memory = Memory::make(handle_, options_.device, bytes, result);
  }
  if (!memory) {
    const std::lock_guard<std::mutex> lock(handle_->mutex);
    handle_->check();
    failure = handle_->describe(result, text("ncclMemAlloc of ", bytes, " bytes"));
  }
  return memory;
}

std::shared_ptr<void> NcclCommunicator::register_memory(const std::shared_ptr<Memory>& memory) {
  const NcclApi& api = *options_.api;
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  const std::string size = text(" of ", memory->bytes, " bytes (every rank must register as many)");
  const std::lock_guard<std::mutex> lock(handle_->mutex);
  handle_->check();
  registration_ = "unregistered";
  handle_->registered.push_back(memory.get());
  // Before this version kernels on windows do not look for an abort. A lost rank would keep the others' devices
  // waiting.
  constexpr int kWindowsCanAbort = 22907;
  if (api.number >= kWindowsCanAbort && api.ncclCommWindowRegister != nullptr &&
      api.ncclCommWindowDeregister != nullptr) {
    handle_->settle(api.ncclCommWindowRegister(handle_->comm, memory->data, memory->bytes, &memory->window,
                                               NCCL_WIN_COLL_SYMMETRIC),
                    "ncclCommWindowRegister" + size, deadline);
    if (memory->window != nullptr) registration_ = "registered window";  // null: these GPUs have no windows
  }
  if (memory->window == nullptr && api.ncclCommRegister != nullptr && api.ncclCommDeregister != nullptr) {
    handle_->settle(api.ncclCommRegister(handle_->comm, memory->data, memory->bytes, &memory->registered),
                    "ncclCommRegister" + size, deadline);
    if (memory->registered != nullptr) registration_ = "registered buffer";
  }
  return {memory, memory->data};
}

int64_t NcclCommunicator::memory_bytes() { return bytes_now; }
int64_t NcclCommunicator::most_memory_bytes() { return most_bytes; }

std::string NcclCommunicator::registration() const {
  const std::lock_guard<std::mutex> lock(handle_->mutex);
  return registration_;
}

// Takes groups in the order of the stream, in which they began.
void NcclCommunicator::take_ended(std::vector<std::shared_ptr<Group>>& ended) {
  while (!under_way_.empty()) {
    const cudaError_t status = state_of(under_way_.front()->end());
    if (status == cudaErrorNotReady) break;
    if (status != cudaSuccess) handle_->fail(describe_cuda(status, "a collective"));
    ended.push_back(std::move(under_way_.front()));
    under_way_.pop_front();
  }
}

// Looks for errors even if all groups have ended: an error may have ended them.
void NcclCommunicator::note_failures() {
  if (handle_->comm == nullptr) return;
  ncclResult_t result = ncclSuccess;
  if (const ncclResult_t asked = options_.api->ncclCommGetAsyncError(handle_->comm, &result); asked != ncclSuccess) {
    result = asked;
  }
  if (result != ncclSuccess && result != ncclInProgress) {
    handle_->fail(handle_->describe(result, "a collective"));
    return;
  }
  if (under_way_.empty()) return;
  const Group& oldest = *under_way_.front();
  if (Clock::now() < oldest.deadline()) return;
  handle_->fail(
      handle_->describe_timeout(text("group ", oldest.number(), " of collectives (", oldest.collectives().size(),
                                     " of them, the first of ", oldest.collectives()[0].count, " elements)")));
}

void NcclCommunicator::watch() {
  static_cast<void>(cudaSetDevice(options_.device));
  // Lets this thread query events while another thread captures a graph.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
  std::vector<std::shared_ptr<Group>> ended;
  std::unique_lock<std::mutex> lock(handle_->mutex);
  while (!stopping_) {
    changed_.wait(lock, [&] { return stopping_ || !under_way_.empty(); });
    take_ended(ended);
    note_failures();
    lock.unlock();  // freeing their memory needs the mutex
    ended.clear();
    lock.lock();
    changed_.wait_for(lock, kLook, [&] { return stopping_; });
  }
}

}  // namespace drivetrain::ddp
