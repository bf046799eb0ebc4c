// Declares a fake communicator with its internal state, and the helpers that the whole library uses.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "board.h"

namespace fake_nccl {

struct Operation;
using Clock = std::chrono::steady_clock;

// Appends a line to the file FAKE_NCCL_LOG, if it is set.
void note(const std::string& line);
// Returns whether FAKE_NCCL_FAULT is `what`. The faults are:
// - "init hangs", "no window", "window hangs"
// - "no memory": ncclMemAlloc fails.
// - "full memory": ncclMemAlloc fails until the process frees memory and sets FAKE_NCCL_FREED.
// - "abort hangs": no kernel looks for an abort, so that ncclCommAbort waits for FAKE_NCCL_WAIT_S.
// - "float sum 5 errors", "float sum 5 hangs", "float sum 5 is refused": a sum of five elements does so.
bool fault(const std::string& what);
void rest();
// Returns the time after which the fake ends a wait that NCCL would never end: FAKE_NCCL_WAIT_S, or 120 s.
std::chrono::seconds longest_wait();
// Returns how long so many bytes are on their way: FAKE_NCCL_LINK, "microseconds per collective, and per MiB", or 0.
std::chrono::microseconds time_on_link(size_t bytes);

}  // namespace fake_nccl

struct ncclComm {
  std::string path;  // the shared file
  int size = 0;
  int rank = 0;
  bool is_blocking = false;
  bool windows_can_abort = false;
  int device = 0;  // the one that was current when this rank joined, which streams of value 0 belong to
  fake_nccl::Board* board = nullptr;

  // A non-blocking communicator finishes its work in `job`, or after so many `polls` of ncclCommGetAsyncError.
  std::thread job;
  std::atomic<bool> has_job{false};
  std::mutex start_mutex;  // guards the next three members: torch's watchdog polls while another thread adds work
  int polls = 0;
  std::vector<fake_nccl::Operation> queued;
  cudaStream_t stream = nullptr;

  std::atomic<int> error{ncclSuccess};
  std::atomic<bool> aborted{false};
  std::mutex text_mutex;
  std::string last_error;

  int64_t meetings = 0;
  int splits = 0;
  int64_t barriers = 0;   // barriers of collectives that this rank has arrived at
  std::mutex turn_mutex;  // guards the next three members
  int64_t launched = 0;   // launches so far; they run in this order
  int64_t ended = 0;
  const void* running = nullptr;

  struct Registered {
    size_t bytes;
    bool is_window;
  };
  std::mutex memory_mutex;                 // guards the next member
  std::map<void*, Registered> registered;  // by address

  std::shared_ptr<ncclComm> self;  // set while the user has it; launches keep a reference too
  ~ncclComm();

  // Records an error. Only the first one is kept.
  void fail(ncclResult_t result, const std::string& text);
  // Returns false if the communicator has an error, also if a peer's process has ended. Looks at the peers seldom.
  bool are_peers_alive();
  // Does the same if the ranks are connected by sockets, and nothing over NVLink.
  void look_at_links();
  bool have_launches_ended();
  void add_memory(void* data, size_t bytes, bool is_window);
  void remove_memory(void* data);
  bool is_in_window(const void* address);
  // Waits until every rank has called it as often. Returns false after an abort, a lost peer or a timeout.
  bool meet(const std::string& what);

 private:
  std::atomic<int64_t> looked_{0};
};
