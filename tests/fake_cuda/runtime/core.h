// Declares the state that all parts of the stand-in share: operations, streams, events, captures, and the lock.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../fake_cuda.h"

#define FAKE_CUDA_API extern "C" __attribute__((visibility("default")))

namespace fake_cuda {

using Time = std::chrono::steady_clock::time_point;

// A vector clock: for each stream, the number of its last operation that is known to run before.
class Clock {
 public:
  void join(const Clock& other);
  uint64_t of(uint32_t stream) const { return stream < numbers_.size() ? numbers_[stream] : 0; }
  void set(uint32_t stream, uint64_t number);

 private:
  std::vector<uint64_t> numbers_;
};

// The description of an operation in reports.
struct OpInfo {
  std::string name, stream, location;
  uint32_t stream_id = 0;
  uint64_t number = 0;
  std::string describe() const;
};

struct Range {
  uintptr_t address;
  size_t bytes;
  bool writes;
};

// A piece of work. It runs once per replay if it belongs to a graph.
struct Work {
  std::string name;
  std::function<int()> run;  // FAKE_CUDA_DONE, _AGAIN or _FAILED; empty if it only orders other work
  std::vector<Range> ranges;
};

struct Stream;

struct Op {
  std::shared_ptr<const Work> work;
  std::shared_ptr<const OpInfo> info;
  Stream* stream = nullptr;
  Clock clock;
  std::vector<std::shared_ptr<Op>> deps;  // operations of other streams that must run first
  std::chrono::microseconds delay{0};     // counts from when it is the first of its stream
  Time ready;
  bool is_urgent = false;  // the host waits for it
  bool has_begun = false;
  bool is_done = false;
  Time done_at;
  mutable uint64_t bytes_read = 0, bytes_written = 0;  // each byte once, unless `ranges` repeat it
};
using OpRef = std::shared_ptr<Op>;

struct Node {
  std::shared_ptr<const Work> work;
  std::vector<size_t> deps;
  size_t lane = 0;
};

// An object that graphs keep.
struct UserObject {
  UserObject(void* pointer, cudaHostFn_t destroy) : pointer(pointer), destroy(destroy) {}
  ~UserObject() { destroy(pointer); }
  UserObject(const UserObject&) = delete;
  void* const pointer;
  const cudaHostFn_t destroy;
};
using UserObjects = std::vector<std::shared_ptr<UserObject>>;

struct Graph {
  std::vector<Node> nodes;
  size_t num_lanes = 0;
  UserObjects kept = {};
};

struct GraphExec {
  std::vector<Node> nodes;
  std::vector<Stream*> lanes;
  UserObjects kept;
};

struct Capture {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  Stream* origin = nullptr;
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  std::map<Stream*, std::set<size_t>> tails;  // the last nodes of each stream in the capture
  std::map<Stream*, size_t> lanes;
  bool is_invalid = false;
};

struct Stream {
  uint32_t id = 0;
  int device = 0;
  int priority = 0;
  bool is_blocking = true;  // ordered against the legacy stream
  bool is_destroyed = false;
  std::string label;
  std::deque<OpRef> queue;
  OpRef last;
  Clock clock;
  uint64_t number = 0;
  unsigned lag = 1;  // factor of its delays, drawn again whenever it was empty
  std::shared_ptr<Capture> capture;
};

struct Event {
  int device = 0;
  unsigned flags = 0;
  OpRef op;  // the last record outside of captures
  std::shared_ptr<Capture> capture;
  std::set<size_t> nodes;  // the stream's last nodes at the last record in a capture
};

// Holds all mutable state. It is never destroyed, because threads may use it until the process ends.
struct State {
  std::mutex mutex;
  std::condition_variable changed;  // wakes the executor: new work, or a waiting host thread
  std::condition_variable done;     // wakes host threads: an operation is done
  std::vector<Stream*> streams;     // all streams, by id
  std::map<int, Stream*> legacy;    // default streams, by device
  std::set<Event*> events;
  std::set<std::shared_ptr<Capture>> captures;
  Clock host;  // the operations that host threads have seen complete
  std::mt19937_64 random{1};
  uint64_t delay_us = 1000;
  uint64_t num_host_waits = 0;
  unsigned long long num_captures = 0;
  cudaError_t device_error = cudaSuccess;
  bool has_executor = false;
  bool is_stopping = false;
  bool is_running = false;                // whether the executor is running work
  std::unique_ptr<std::ofstream> record;  // lists the work that runs; see fake_cuda_record
};
State& state();
using Lock = std::unique_lock<std::mutex>;

extern thread_local int current_device;
extern thread_local cudaStreamCaptureMode thread_capture_mode;
int num_devices();

// Records the error of a call for cudaGetLastError, and returns it.
cudaError_t fail(cudaError_t error);
// Also sets a specific text, which cudaGetErrorString then returns.
cudaError_t fail(cudaError_t error, std::string text);

// --- contexts.cpp
// Notes that a call needs a context of the calling thread's device, which CUDA makes if there is none. Calls about a
// stream or an event of another device need it too.
void use_context(const char* call);
void make_context(int device, const char* call);
// Writes the calling thread's stacks, Python's and that of shared libraries, to a file descriptor.
void dump_stacks(int file);

// --- streams.cpp: callers hold the lock.
Stream* find_stream(cudaStream_t handle);  // null if there is no such stream
Stream* make_stream(int device, bool is_blocking, std::string label);
OpRef append(Stream* stream, std::shared_ptr<const Work> work, std::vector<OpRef> deps = {});
// Appends work to the stream or, while it captures, to its graph.
cudaError_t enqueue(Stream* stream, std::shared_ptr<const Work> work);
cudaError_t wait_for(Lock& lock, const std::vector<OpRef>& ops, const char* call);
// Records that the host has seen this operation complete.
void observe(const OpRef& op);
OpRef marker(Stream* stream, const char* name);

// --- executor.cpp
void start_executor();
bool is_executor();
const OpRef& running();  // the operation that the executor runs; for its own thread only

// --- graphs.cpp: callers hold the lock.
bool is_forbidden_by_capture();  // if true, the captures that forbid the call are invalid now
void invalidate(const std::shared_ptr<Capture>& capture);
cudaError_t check_capture(Stream* stream);  // for calls that a capturing stream does not allow

// --- memory.cpp
enum class Kind { kDevice, kPinned, kPageable };
struct Place {
  Kind kind = Kind::kPageable;
  int device = -1;
  uintptr_t begin = 0;  // start of its allocation
  size_t bytes = 0;
  bool is_known = false;  // whether it lies within a live allocation
};
Place place_of(const void* address);
bool is_in_arena(uintptr_t address);
bool has_pinned(const void* address, size_t bytes);  // whether a page of the range is page-locked
void* view(const void* address);
size_t device_bytes();
void close_after_fault();
std::string describe_address(uintptr_t address);

// --- races.cpp
void check_access(const Op& op, uintptr_t address, size_t bytes, bool writes);
void forget_accesses(uintptr_t address, size_t bytes);
std::string last_writer(uintptr_t address);

// --- reports.cpp
void report(const char* kind, const std::string& text);
bool dies_of_errors();
// Copies a text and its null, as far as they fit, and returns the bytes that they need.
size_t copy_text(const std::string& from, char* to, size_t bytes);
// Records the innermost Python line outside of torch for the thread's next operations, if FAKE_CUDA_TRACE is 1. Callers
// must not hold the lock, because this takes the interpreter's.
void note_location();
const std::string& location();
uint64_t number_from_environment(const char* name, uint64_t otherwise);

}  // namespace fake_cuda
