// A libnccl on the host, for ranks of one machine: collectives go through a file in /dev/shm, on fake_cuda's streams.
// As strict as NCCL where that matters: nothing is done until it has been asked for twice (non-blocking), a group is
// reordered by size, ranks that group differently get an error, and a collective whose peer is missing never ends
// unless it is aborted.
//
// FAKE_NCCL_VERSION (at build time): functions of later versions are missing.
// FAKE_NCCL_LOG: a file that gets a line for every call. FAKE_NCCL_FAULT: what goes wrong; see fault().
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kChunk = 1 << 20;
constexpr int kMaxRanks = 4;

// What the ranks share; zeroed by ftruncate.
struct Board {
  std::atomic<int> joined;
  std::atomic<int64_t> arrived;
  int64_t what[kMaxRanks][5];
  char values[kMaxRanks][kChunk];
};

struct Operation {
  void* values;
  size_t count;
  ncclDataType_t type;
  int op;  // ncclRedOp_t; -1: a broadcast
  size_t group;
  std::string text() const {
    return (op == ncclAvg ? "mean " : op == ncclSum ? "sum " : "broadcast ") + std::to_string(count);
  }
};

}  // namespace

struct ncclComm {
  int size = 0;
  int rank = 0;
  bool joined = false;
  Board* board = nullptr;
  int64_t barriers = 0;
  int polls = 0;  // left until what was asked for has been done
  std::vector<Operation> queued;
  cudaStream_t stream = nullptr;
  std::atomic<int> error{ncclSuccess};
  std::atomic<bool> aborted{false};
  std::string last_error;
  std::shared_ptr<ncclComm> self;  // while the user has it; collectives under way hold it too
  ~ncclComm() {
    if (board != nullptr) ::munmap(board, sizeof(Board));
  }
};

namespace {

thread_local int depth = 0;
thread_local std::vector<std::pair<ncclComm*, Operation>> grouped;
thread_local cudaStream_t grouped_stream;

template <class... Parts>
void note(const Parts&... parts) {
  static std::mutex mutex;
  const char* const path = std::getenv("FAKE_NCCL_LOG");
  if (path == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex);
  std::ofstream out(path, std::ios::app);
  (out << ... << parts) << std::endl;
}

// "init hangs", "no window", "mean 5 errors", "mean 5 hangs", "mean 5 is refused": of five elements.
bool fault(const std::string& what) {
  const char* const wanted = std::getenv("FAKE_NCCL_FAULT");
  return wanted != nullptr && what == wanted;
}

void pause() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

bool meet(ncclComm& comm) {
  const int64_t all = ++comm.barriers * comm.size;
  ++comm.board->arrived;
  while (comm.board->arrived < all && !comm.aborted) pause();
  return !comm.aborted;
}

template <class T>
void reduce(const ncclComm& comm, T* values, size_t count, int op) {
  for (size_t i = 0; i < count; ++i) {
    T sum = 0;
    for (int rank = 0; rank < (op < 0 ? 1 : comm.size); ++rank) {
      sum += reinterpret_cast<const T*>(comm.board->values[rank])[i];
    }
    values[i] = op == ncclAvg ? sum / static_cast<T>(comm.size) : sum;
  }
}

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat32:
    case ncclInt32:
      return 4;
    case ncclFloat64:
    case ncclInt64:
      return 8;
    default:
      return 0;
  }
}

void perform(ncclComm& comm, const Operation& operation) {
  const bool errs = fault(operation.text() + " errors");
  if (errs || fault(operation.text() + " hangs")) {
    if (errs) comm.error = ncclRemoteError;
    while (!comm.aborted) pause();
    return;
  }
  const size_t element = bytes_of(operation.type);
  for (size_t done = 0; done < operation.count; done += kChunk / element) {
    const size_t count = std::min(kChunk / element, operation.count - done);
    char* const values = static_cast<char*>(operation.values) + done * element;
    const int64_t what[5] = {static_cast<int64_t>(operation.count), operation.type, operation.op,
                             static_cast<int64_t>(operation.group), static_cast<int64_t>(done)};
    std::memcpy(comm.board->what[comm.rank], what, sizeof(what));
    std::memcpy(comm.board->values[comm.rank], values, count * element);
    if (!meet(comm)) return;
    for (int rank = 0; rank < comm.size; ++rank) {
      if (std::memcmp(comm.board->what[rank], what, sizeof(what)) != 0) {
        comm.error = ncclInvalidUsage;
        while (!comm.aborted) pause();
        return;
      }
    }
    switch (operation.type) {
      case ncclFloat32:
        reduce(comm, reinterpret_cast<float*>(values), count, operation.op);
        break;
      case ncclFloat64:
        reduce(comm, reinterpret_cast<double*>(values), count, operation.op);
        break;
      case ncclInt32:
        reduce(comm, reinterpret_cast<int32_t*>(values), count, operation.op);
        break;
      default:
        reduce(comm, reinterpret_cast<int64_t*>(values), count, operation.op);
    }
    if (!meet(comm)) return;
  }
}

struct Launch {
  std::shared_ptr<ncclComm> comm;
  Operation operation;
};

void launch(ncclComm& comm) {
  std::stable_sort(comm.queued.begin(), comm.queued.end(),
                   [](const Operation& a, const Operation& b) { return a.count > b.count; });
  for (const Operation& operation : comm.queued) {
    cudaLaunchHostFunc(
        comm.stream,
        [](void* data) {
          const std::unique_ptr<Launch> launched(static_cast<Launch*>(data));
          perform(*launched->comm, launched->operation);
        },
        new Launch{comm.self, operation});
  }
  comm.queued.clear();
}

ncclResult_t add(ncclComm* comm, const Operation& operation, cudaStream_t stream) {
  if (depth == 0 || bytes_of(operation.type) == 0) return ncclInvalidArgument;
  if (fault(operation.text() + " is refused")) {
    comm->last_error = "fake NCCL refuses it";
    return ncclInvalidUsage;
  }
  grouped.emplace_back(comm, operation);
  grouped_stream = stream;
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited or there was a network error" : "fake error";
}

const char* ncclGetLastError(ncclComm_t comm) { return comm == nullptr ? "" : comm->last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  const std::string name = "/dev/shm/fake-nccl-" + std::to_string(random()) + std::to_string(random());
  std::memset(id->internal, 0, sizeof(id->internal));
  std::strncpy(id->internal, name.c_str(), sizeof(id->internal) - 1);
  note("GetUniqueId");
  return ncclSuccess;
}

#if FAKE_NCCL_VERSION >= 21400
ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (size > kMaxRanks || config->blocking != 0) return ncclInvalidArgument;
  const int file = ::open(id.internal, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ::ftruncate(file, sizeof(Board)) != 0) return ncclSystemError;
  auto comm = std::make_shared<ncclComm>();
  comm->board = static_cast<Board*>(::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  ::close(file);
  comm->size = size;
  comm->rank = rank;
  if (!fault("init hangs") && ++comm->board->joined == size) ::unlink(id.internal);
  comm->self = comm;
  *result = comm.get();
  note("Init rank ", rank, " of ", size);
  return ncclInProgress;
}
#endif

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  comm->joined = comm->joined || comm->board->joined == comm->size;
  if (!comm->joined || comm->polls > 0) {
    *result = ncclInProgress;
    if (comm->joined && --comm->polls == 0) launch(*comm);
    return ncclSuccess;
  }
  *result = static_cast<ncclResult_t>(comm->error.load());
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  note("Finalize");
  comm->polls = 2;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  note("Destroy");
  comm->self.reset();
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  note("Abort");
  comm->aborted = true;
  comm->self.reset();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--depth > 0 || grouped.empty()) return ncclSuccess;
  std::string list;
  for (auto& [comm, operation] : grouped) {
    operation.group = grouped.size();
    comm->queued.push_back(operation);
    comm->stream = grouped_stream;
    comm->polls = 2;
    list += (list.empty() ? "" : ", ") + operation.text();
  }
  grouped.clear();
  note("Group: ", list);
  return ncclInProgress;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return from == to ? add(comm, {to, count, type, op, 0}, stream) : ncclInvalidArgument;
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return from == to && root == 0 ? add(comm, {to, count, type, -1, 0}, stream) : ncclInvalidArgument;
}

#if FAKE_NCCL_VERSION >= 21900
ncclResult_t ncclMemAlloc(void** data, size_t bytes) {
  note("MemAlloc ", bytes);
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *data == nullptr ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclMemFree(void* data) {
  note("MemFree");
  std::free(data);
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t, void* data, size_t bytes, void** handle) {
  note("Register ", bytes);
  *handle = data;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
  note("Deregister");
  return ncclSuccess;
}
#endif

#if FAKE_NCCL_VERSION >= 22700
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* data, size_t bytes, ncclWindow_t* window, int flags) {
  if (flags != NCCL_WIN_COLL_SYMMETRIC) return ncclInvalidArgument;
  note("WindowRegister ", bytes);
  *window = fault("no window") ? nullptr : static_cast<ncclWindow_t>(data);
  comm->polls = 1;
  return ncclInProgress;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
  note("WindowDeregister");
  return ncclSuccess;
}
#endif
}
