// Implements libnccl on the host for ranks of one machine. Collectives go through a file in /dev/shm. Streams are those
// of tests/fake_cuda if the process runs on it, otherwise those of tests/fake_nccl/fake_cuda.cpp.
//
// The fake is as strict as NCCL where callers can make mistakes:
// - On a non-blocking communicator, a group starts only after two calls of ncclCommGetAsyncError.
// - Groups are reordered by size, and ranks that group differently get an error.
// - A collective whose peer is missing never ends unless it is aborted or FAKE_NCCL_WAIT_S is over. As over NVLink,
//   nothing tells that the peer's process has ended. FAKE_NCCL_SOCKETS=1 lets ncclCommGetAsyncError tell.
// - ncclCommAbort waits for the device. Kernels on windows look for an abort from NCCL 2.29.7 on only.
// - Memory that is still registered when its communicator is destroyed is never freed.
// - On a non-blocking communicator, registering a window returns ncclSuccess with a null window, as in NCCL 2.28.9. The
//   registration ends in the background once every rank has joined it. Until then the communicator refuses most calls.
// - Two ranks on one GPU of a host (NCCL_HOSTID) are refused.
// - Buffers that overlap other than in place are refused, and roots that no rank has. NCCL reports only the latter.
// - Both sides of a message need equal counts and types. A send ends only once it is received, and without the other
//   side never. A message of a rank to itself needs both sides in one group.
//
// FAKE_NCCL_VERSION is set at build time; functions of later versions are missing. communicator.h describes the log and
// the faults.
#include <dlfcn.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <utility>

#include "communicator.h"
#include "launch.h"
#include "reduce.h"

namespace {

using namespace fake_nccl;

thread_local int depth = 0;
struct Added {
  ncclComm* comm;
  Operation operation;
  cudaStream_t stream;
};
thread_local std::vector<Added> grouped;
thread_local std::string thread_error;
std::mutex lost_mutex;
std::set<void*> lost;  // memory that ncclMemFree() does not free

ncclResult_t refuse(const std::string& text) {
  thread_error = text;
  return ncclInvalidUsage;
}

// Runs the job, in a thread if the communicator is non-blocking.
ncclResult_t carry_out(ncclComm& comm, const std::function<ncclResult_t()>& job) {
  if (comm.is_blocking) return job();
  if (comm.job.joinable()) comm.job.join();
  comm.has_job = true;
  comm.job = std::thread([&comm, job] {
    if (const ncclResult_t result = job(); result != ncclSuccess) comm.fail(result, "");
    comm.has_job = false;
  });
  return ncclInProgress;
}

// Returns whether ncclCommGetAsyncError() has reported the end of the previous call. Otherwise callers refuse theirs.
bool is_ready(ncclComm& comm) {
  const std::lock_guard<std::mutex> lock(comm.start_mutex);
  if (comm.polls == 0 && !comm.has_job) return true;
  thread_error = "Attempt to use communicator before the previous operation returned ncclSuccess";
  return false;
}

// Aborts if the calling thread holds Python's GIL while other ranks join in: their threads may need it.
void refuse_gil() {
  using Check = int (*)();
  const auto holds_gil = reinterpret_cast<Check>(::dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  const auto is_initialized = reinterpret_cast<Check>(::dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  if (holds_gil == nullptr || is_initialized == nullptr || is_initialized() == 0 || holds_gil() == 0) return;
  std::fputs("fake NCCL: a thread that holds Python's GIL waits for other ranks\n", stderr);
  std::abort();
}

template <class Function>
Function of_device(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
}

int current_device() {
  const auto get_device = of_device<cudaError_t (*)(int*)>("cudaGetDevice");
  int device = 0;
  return get_device != nullptr && get_device(&device) == cudaSuccess ? device : -1;
}

// Returns the host, which NCCL_HOSTID may name, and the GPU's bus. Returns "" if the fake CUDA has no buses.
std::string gpu_of_this_rank() {
  const auto get_bus = of_device<cudaError_t (*)(char*, int, int)>("cudaDeviceGetPCIBusId");
  char bus[32] = "";
  if (get_bus == nullptr || get_bus(bus, sizeof(bus), current_device()) != cudaSuccess) return "";
  const char* const host = std::getenv("NCCL_HOSTID");
  return std::string(host == nullptr ? "this host" : host) + "/" + bus;
}

ncclResult_t join(ncclComm& comm) {
  if (!fault("init hangs") && ++comm.board->joined == comm.size) ::unlink(comm.path.c_str());
  const Clock::time_point deadline = Clock::now() + longest_wait();
  while (comm.board->joined < comm.size) {
    if (comm.aborted || !comm.are_peers_alive()) return ncclRemoteError;
    if (Clock::now() > deadline) {
      comm.fail(ncclSystemError, "fake NCCL waited too long for every rank to join");
      return ncclSystemError;
    }
    rest();
  }
  for (int a = 0; a < comm.size; ++a) {
    for (int b = a + 1; b < comm.size; ++b) {
      if (comm.board->gpus[a][0] == 0 || std::strcmp(comm.board->gpus[a], comm.board->gpus[b]) != 0) continue;
      comm.fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(a) + " and rank " +
                                      std::to_string(b) + " both on CUDA device " + comm.board->gpus[a]);
      return ncclInvalidUsage;
    }
  }
  return ncclSuccess;
}

ncclResult_t make(ncclComm_t* result, const std::string& path, int size, int rank, bool is_blocking) {
  *result = nullptr;
  if (size > kMaxRanks)
    return refuse("fake NCCL supports at most " + std::to_string(kMaxRanks) + " ranks; got " + std::to_string(size));
  auto comm = std::make_shared<ncclComm>();
  comm->path = path;
  comm->size = size;
  comm->rank = rank;
  comm->is_blocking = is_blocking;
  comm->device = current_device();
  comm->windows_can_abort = FAKE_NCCL_VERSION >= 22907;
  comm->board = open_board(path);
  if (comm->board == nullptr) return ncclSystemError;
  comm->board->processes[rank] = ::getpid();
  std::strncpy(comm->board->gpus[rank], gpu_of_this_rank().c_str(), sizeof(comm->board->gpus[rank]) - 1);
  comm->self = comm;
  *result = comm.get();
  note("Init rank " + std::to_string(rank) + " of " + std::to_string(size));
  const ncclResult_t state = carry_out(*comm, [comm = comm.get()] { return join(*comm); });
  if (state == ncclSuccess || state == ncclInProgress) return state;
  ::unlink(path.c_str());
  thread_error = comm->last_error;
  *result = nullptr;
  comm->self.reset();
  return state;
}

bool wants_blocking(const ncclConfig_t* config) { return config == nullptr || config->blocking != 0; }

// As NCCL, launches on the communicator's device, whichever device the calling thread has.
void launch_queued(ncclComm& comm) {
  if (comm.queued.empty()) return;
  const auto set_device = of_device<cudaError_t (*)(int)>("cudaSetDevice");
  const int former = current_device();
  if (former != comm.device) set_device(comm.device);
  launch(comm, std::exchange(comm.queued, {}), comm.stream);
  if (former != comm.device) set_device(former);
}

// Returns what is wrong with a group's messages; "": nothing. NCCL refuses messages of a rank to itself without both
// sides. What it leaves in memory is undefined where a receive overlaps with another message.
std::string defect_of_messages(const ncclComm& comm) {
  std::vector<Operation> messages, to_self[2];
  for (const Added& one : grouped) {
    if (one.comm != &comm || !one.operation.is_between_two()) continue;
    messages.push_back(one.operation);
    if (one.operation.peer == comm.rank) to_self[one.operation.kind == Kind::kSend].push_back(one.operation);
  }
  const auto is_alike = [](const Operation& a, const Operation& b) { return a.count == b.count && a.type == b.type; };
  if (!std::equal(to_self[0].begin(), to_self[0].end(), to_self[1].begin(), to_self[1].end(), is_alike)) {
    return "a rank sends to itself without an equal receive in the group, or the reverse";
  }
  const auto begin = [](const Operation& of) { return static_cast<const char*>(of.to == nullptr ? of.from : of.to); };
  for (const Operation& a : messages) {
    const char* const end = begin(a) + a.count * bytes_of(a.type);
    if (a.count > 0 && begin(a) == nullptr) return a.text() + " has no buffer";
    for (const Operation& b : messages) {
      const char* const other_end = begin(b) + b.count * bytes_of(b.type);
      const bool overlaps = &a != &b && begin(a) < other_end && begin(b) < end;
      if (a.kind == Kind::kRecv && overlaps) return a.text() + " overlaps with " + b.text() + " of its group";
    }
  }
  return "";
}

ncclResult_t end_group() {
  std::vector<ncclComm*> comms;
  for (const Added& one : grouped) {
    if (std::find(comms.begin(), comms.end(), one.comm) == comms.end()) comms.push_back(one.comm);
  }
  for (const ncclComm* comm : comms) {
    if (const std::string defect = defect_of_messages(*comm); !defect.empty()) {
      grouped.clear();
      return refuse(defect);
    }
  }
  ncclResult_t result = ncclSuccess;
  for (ncclComm* comm : comms) {
    const std::lock_guard<std::mutex> lock(comm->start_mutex);
    std::string list;
    for (const Added& one : grouped) {
      if (one.comm != comm) continue;
      comm->queued.push_back(one.operation);
      comm->stream = one.stream;
      list += (list.empty() ? "" : ", ") + one.operation.text();
    }
    for (Operation& operation : comm->queued) operation.group = comm->queued.size();
    note("Group: " + list);
    if (comm->is_blocking) {
      launch_queued(*comm);
    } else {
      comm->polls = 2;
      result = ncclInProgress;
    }
  }
  grouped.clear();
  return result;
}

// Returns whether the buffers are apart, or lie as NCCL's documentation of operations in place says.
bool are_buffers_legal(const ncclComm& comm, const Operation& operation) {
  const bool writes_nothing = operation.kind == Kind::kReduce && operation.peer != comm.rank;
  if (operation.count == 0 || operation.is_between_two()) return true;
  if (operation.from == nullptr || operation.to == nullptr) return operation.from != nullptr && writes_nothing;
  const size_t part = operation.count * bytes_of(operation.type);
  const bool scatters = operation.kind == Kind::kReduceScatter, gathers = operation.kind == Kind::kAllGather;
  const bool exchanges = operation.kind == Kind::kAllToAll;
  const char* const from = static_cast<const char*>(operation.from);
  const char* const to = static_cast<const char*>(operation.to);
  const char* const from_end = from + (scatters || exchanges ? comm.size : 1) * part;
  const char* const to_end = to + (gathers || exchanges ? comm.size : 1) * part;
  if (from_end <= to || to_end <= from) return true;
  if (scatters) return to == from + comm.rank * part;
  if (gathers) return from == to + comm.rank * part;
  return from == to && !exchanges;
}

ncclResult_t add(ncclComm* comm, Operation operation, cudaStream_t stream) {
  if (bytes_of(operation.type) == 0)
    return refuse("fake NCCL does not know the type " + std::to_string(operation.type));
  if (!is_ready(*comm)) return ncclInvalidArgument;
  if (operation.peer < 0 || operation.peer >= comm->size) {
    refuse(operation.text() + " has the root or peer " + std::to_string(operation.peer));
    return ncclInvalidArgument;
  }
  if (!are_buffers_legal(*comm, operation)) return refuse(operation.text() + " has buffers that overlap, not in place");
  if (fault(operation.text() + " is refused")) return refuse("fake NCCL refuses it");
  if (const int error = comm->error; error != ncclSuccess) return static_cast<ncclResult_t>(error);
  grouped.push_back({comm, operation, stream});
  return depth > 0 ? ncclSuccess : end_group();
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

const char* ncclGetLastError(ncclComm_t comm) {
  if (comm != nullptr) {
    const std::lock_guard<std::mutex> lock(comm->text_mutex);
    if (!comm->last_error.empty()) thread_error = comm->last_error;
  }
  return thread_error.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  const std::string name = "/dev/shm/fake-nccl-" + std::to_string(random()) + std::to_string(random());
  std::memset(id->internal, 0, sizeof(id->internal));
  std::strncpy(id->internal, name.c_str(), sizeof(id->internal) - 1);
  note("GetUniqueId");
  return ncclSuccess;
}

#if FAKE_NCCL_VERSION >= 21400
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return make(comm, id.internal, size, rank, wants_blocking(config));
}
#endif

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return make(comm, id.internal, size, rank, true);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t* config) {
  return make(comm, ids[0].internal, size, rank, wants_blocking(config));
}

// Waits for the other ranks, also on a non-blocking communicator.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* result, ncclConfig_t* config) {
  *result = nullptr;
  if (!is_ready(*comm)) return ncclInvalidArgument;
  comm->board->colors[comm->rank] = color;
  comm->board->keys[comm->rank] = key;
  if (!comm->meet("ncclCommSplit")) return static_cast<ncclResult_t>(comm->error.load());
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int rank = 0; rank < comm->size; ++rank) {
    if (comm->board->colors[rank] == color) members.emplace_back(comm->board->keys[rank], rank);
  }
  if (!comm->meet("ncclCommSplit")) return static_cast<ncclResult_t>(comm->error.load());
  const int split = comm->splits++;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::sort(members.begin(), members.end());
  const auto own = std::find(members.begin(), members.end(), std::pair<int, int>(key, comm->rank));
  const std::string path = comm->path + "-" + std::to_string(split) + "-" + std::to_string(color);
  return make(
      result, path, static_cast<int>(members.size()), static_cast<int>(own - members.begin()),
      config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT ? comm->is_blocking : config->blocking != 0);
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  *result = ncclInProgress;
  if (comm->has_job) {
    refuse_gil();
    return ncclSuccess;
  }
  {
    const std::lock_guard<std::mutex> lock(comm->start_mutex);
    if (comm->polls > 0) {
      if (--comm->polls == 0) launch_queued(*comm);
      return ncclSuccess;
    }
  }
  comm->look_at_links();
  *result = static_cast<ncclResult_t>(comm->error.load());
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (!is_ready(*comm)) return ncclInvalidArgument;
  note("Finalize");
  if (comm->is_blocking) return ncclSuccess;
  const std::lock_guard<std::mutex> lock(comm->start_mutex);
  comm->polls = 2;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!is_ready(*comm)) return ncclInvalidArgument;
  note("Destroy");
  if (comm->job.joinable()) comm->job.join();
  {
    const std::lock_guard<std::mutex> lock(lost_mutex);
    for (const auto& [data, memory] : comm->registered) lost.insert(data);
  }
  comm->self.reset();
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  note("Abort");
  comm->aborted = true;
  ::unlink(comm->path.c_str());
  if (comm->job.joinable()) comm->job.join();
  const Clock::time_point deadline = Clock::now() + longest_wait();
  while (!comm->have_launches_ended() && Clock::now() < deadline) rest();
  note("Aborted");
  comm->self.reset();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() { return --depth > 0 || grouped.empty() ? ncclSuccess : end_group(); }

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, {Kind::kAllReduce, from, to, count, type, op, 0, 1}, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return add(comm, {Kind::kBroadcast, from, to, count, type, ncclSum, root, 1}, stream);
}

ncclResult_t ncclBcast(void* values, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return add(comm, {Kind::kBroadcast, values, values, count, type, ncclSum, root, 1}, stream);
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return add(comm, {Kind::kReduce, from, to, count, type, op, root, 1}, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return add(comm, {Kind::kAllGather, from, to, count, type, ncclSum, 0, 1}, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return add(comm, {Kind::kReduceScatter, from, to, count, type, op, 0, 1}, stream);
}

ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  return add(comm, {Kind::kAllToAll, from, to, count, type, ncclSum, 0, 1}, stream);
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(comm, {Kind::kSend, from, nullptr, count, type, ncclSum, peer, 1}, stream);
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, {Kind::kRecv, nullptr, to, count, type, ncclSum, peer, 1}, stream);
}

#if FAKE_NCCL_VERSION >= 21900
// Allocates from the fake device, whose memory may be full. Without such a device, it allocates host memory.
ncclResult_t ncclMemAlloc(void** data, size_t bytes) {
  note("MemAlloc " + std::to_string(bytes));
  if (fault("no memory") || (fault("full memory") && std::getenv("FAKE_NCCL_FREED") == nullptr)) {
    return ncclUnhandledCudaError;
  }
  if (const auto allocate = of_device<cudaError_t (*)(void**, size_t)>("cudaMalloc")) {
    return allocate(data, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  }
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *data == nullptr ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclMemFree(void* data) {
  {
    const std::lock_guard<std::mutex> lock(lost_mutex);
    if (lost.erase(data) != 0) {
      note("MemFree leaks");
      return ncclSuccess;
    }
  }
  note("MemFree");
  if (const auto release = of_device<cudaError_t (*)(void*)>("cudaFree")) {
    return release(data) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  }
  std::free(data);
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* data, size_t bytes, void** handle) {
  if (!is_ready(*comm)) return ncclInvalidArgument;
  note("Register " + std::to_string(bytes));
  *handle = data;
  comm->add_memory(data, bytes, /*is_window=*/false);
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  if (!is_ready(*comm)) return ncclInvalidArgument;
  note("Deregister");
  comm->remove_memory(handle);
  return ncclSuccess;
}
#endif

#if FAKE_NCCL_VERSION >= 22700
// The job sets the window before the ranks meet, so a window that is set does not prove that they have met.
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* data, size_t bytes, ncclWindow_t* window, int flags) {
  *window = nullptr;
  if (flags != NCCL_WIN_COLL_SYMMETRIC || !is_ready(*comm)) return ncclInvalidArgument;
  note("WindowRegister " + std::to_string(bytes));
  const ncclWindow_t made = fault("no window") ? nullptr : static_cast<ncclWindow_t>(data);
  const bool hangs = fault("window hangs");
  if (made != nullptr) comm->add_memory(data, bytes, /*is_window=*/true);
  const ncclResult_t result = carry_out(*comm, [comm, window, made, hangs] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    *window = made;
    while (hangs && !comm->aborted) rest();
    if (hangs) return ncclSystemError;  // the peers' registration must not complete after this rank gave up
    return comm->meet("ncclCommWindowRegister") ? ncclSuccess : ncclSystemError;
  });
  return result == ncclInProgress ? ncclSuccess : result;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  if (!is_ready(*comm)) return ncclInvalidArgument;
  note("WindowDeregister");
  comm->remove_memory(window);
  return ncclSuccess;
}
#endif

// The following functions exist only because torch links to them.
ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return refuse("fake NCCL has no ncclCommInitAll"); }
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return refuse("fake NCCL has no ncclGroupSimulateEnd"); }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
  return refuse("fake NCCL has no ncclRedOpCreatePreMulSum");
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return refuse("fake NCCL has no ncclRedOpDestroy"); }
ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) {
  return refuse("fake NCCL has no ncclCommShrink");
}
struct ncclDevComm;
struct ncclDevCommRequirements;
ncclResult_t ncclDevCommCreate(ncclComm_t, const ncclDevCommRequirements*, ncclDevComm*) {
  return refuse("fake NCCL has no device communicators");
}
ncclResult_t ncclDevCommDestroy(ncclComm_t, const ncclDevComm*) {
  return refuse("fake NCCL has no device communicators");
}
}
