// Declares an NCCL communicator on its own stream, which aborts collectives instead of hanging. Needs no torch header.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ddp/transport/nccl/nccl_api.h"

namespace drivetrain::ddp {

// The communicator is non-blocking: no call of NCCL takes long, and calls that continue in NCCL's threads are awaited
// with a limit. The host never waits for the device: wait() lets a stream wait.
//
// A thread polls the collectives in progress. If NCCL reports an error, or a collective has not ended within the
// timeout, the next call throws, and the communicator is aborted. That also ends the collectives on the device. Their
// values are then undefined, and streams that wait for them go on.
//
// Thread safety: any thread may call any method, even while another one waits.
class NcclCommunicator {
 public:
  struct Options {
    std::shared_ptr<const NcclApi> api;
    ncclUniqueId id = {};
    int size = 0;
    int rank = 0;
    int device = 0;  // CUDA's number; the current device of every calling thread
    std::chrono::nanoseconds timeout{};
  };

  enum class Kind { kAllReduce, kReduceScatter, kReduce, kAllGather, kBroadcast, kSend, kReceive };

  // A collective in place, or one rank's side of a message. Reductions leave sums.
  struct Collective {
    void* values = nullptr;
    size_t count = 0;  // as NCCL takes it: of one rank's part for kReduceScatter and kAllGather
    ncclDataType_t type = ncclFloat32;
    std::shared_ptr<void> keep;  // owns the values; released once the collective has ended
    Kind kind = Kind::kAllReduce;
    void* own = nullptr;  // this rank's part of the values, of kReduceScatter and kAllGather
    int root = 0;         // whom kReduce leaves the sum, whose values kBroadcast sends, and the other side of a message
  };

  // A group of collectives that begin and end together.
  class Group;

  // Meets the other ranks within the timeout.
  explicit NcclCommunicator(Options options);
  // Ends the communicator as end() does.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Begins the collectives after the work that `stream` has so far. Every rank must start the same groups in the same
  // order. Within a group NCCL chooses the order.
  std::shared_ptr<Group> start(std::vector<Collective> collectives, cudaStream_t stream);
  // Makes later work of `stream` wait for the group's end.
  void wait(Group& group, cudaStream_t stream);
  // Returns true if the device has completed the group, or it has failed.
  bool is_done(Group& group);
  // Aborts all collectives, and lets every later call throw this error, unless there was one before.
  void give_up(const std::string& why);
  // Finalizes the communicator if everything in progress ends within 5 s, else aborts it. Returns "", or what it leaves
  // to the device where NCCL's abort takes more than 5 s. Call nothing else afterwards.
  std::string end() noexcept;

  // Device memory in which collectives work best.
  class Memory;

  // Allocates memory that its last owner frees, possibly after the communicator. If the first attempt fails, calls
  // `release_cache`, which returns unused memory of other allocators to the device, and tries again. Returns null where
  // NCCL is too old to allocate memory, and where too little is left: `failure` then says so.
  std::shared_ptr<Memory> allocate(size_t bytes, const std::function<void()>& release_cache, std::string& failure);
  // Registers the memory with the communicator as well as this NCCL can, and returns its address. Every rank must
  // register the same sizes in the same order. Waits for the others within the timeout.
  std::shared_ptr<void> register_memory(const std::shared_ptr<Memory>& memory);
  // Returns how the last memory was registered: "registered window", "registered buffer" or "unregistered"; "": none.
  std::string registration() const;

  // Return the bytes of allocated memory over all communicators of this process, and their peak. torch's allocator does
  // not count them.
  static int64_t memory_bytes();
  static int64_t most_memory_bytes();

 private:
  class Handle;

  ncclResult_t call(const Collective& collective, const char*& name) const;
  void watch();
  void note_failures();
  void take_ended(std::vector<std::shared_ptr<Group>>& ended);

  const Options options_;
  const std::shared_ptr<Handle> handle_;  // shared with the memory
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr;  // on the caller's stream, when a group starts
  int64_t num_groups_ = 0;
  std::deque<std::shared_ptr<Group>> under_way_;
  std::string registration_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread watcher_;
};

}  // namespace drivetrain::ddp
