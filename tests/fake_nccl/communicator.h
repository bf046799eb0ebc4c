// A fake communicator: what a rank knows of it, its state behind the scenes, and what the whole library uses.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
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
// Whether FAKE_NCCL_FAULT is `what`: "init hangs", "no window", "window hangs", "no memory" (ncclMemAlloc fails), "full
// memory" (it does until the process gives memory back, which FAKE_NCCL_FREED tells), "float sum 5 errors", "float sum
// 5 hangs", "float sum 5 is refused" (of five elements).
bool fault(const std::string& what);
void rest();
// After which the fake gives up what NCCL would wait for without an end: FAKE_NCCL_WAIT_S, or 120 s.
std::chrono::seconds longest_wait();

}  // namespace fake_nccl

struct ncclComm {
  std::string path;  // of the board
  int size = 0;
  int rank = 0;
  bool is_blocking = false;
  fake_nccl::Board* board = nullptr;

  // What a non-blocking communicator has left to do: by a thread of its own, or until it has been asked so often.
  std::thread job;
  std::atomic<bool> has_job{false};
  int polls = 0;
  std::vector<fake_nccl::Operation> queued;
  cudaStream_t stream = nullptr;

  std::atomic<int> error{ncclSuccess};
  std::atomic<bool> aborted{false};
  std::mutex text_mutex;
  std::string last_error;

  int64_t meetings = 0;
  int splits = 0;
  int64_t barriers = 0;   // of the launch that runs
  std::mutex turn_mutex;  // of the next three
  int64_t launched = 0;   // launches so far; they run in this order
  int64_t ended = 0;
  const void* running = nullptr;

  std::shared_ptr<ncclComm> self;  // while the user has it; launches hold it too
  ~ncclComm();

  // The first error stays.
  void fail(ncclResult_t result, const std::string& text);
  // Whether the peers are all there; else the communicator has an error now. Looks at them seldom.
  bool are_peers_alive();
  // Waits until every rank has called it as often. False: the communicator was aborted, or a rank has not come.
  bool meet(const std::string& what);

 private:
  std::atomic<int64_t> looked_{0};
};
