// An NCCL communicator on a stream of its own: begins collectives in groups, watches those under way, and aborts
// instead of hanging. Needs no torch header.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ddp/transport/nccl_api.h"

namespace drivetrain::ddp {

// The communicator is non-blocking, so that no call of NCCL's takes long and each that goes on behind the scenes is
// waited for with a limit. Nothing here makes the host wait for the device: wait() lets a stream wait.
//
// A thread looks at what is under way. If NCCL reports an error, or a collective has not ended within the timeout, it
// aborts the communicator, which ends the collectives on the device too: their values are then undefined, streams that
// wait for them go on, and whatever is asked of the communicator next throws.
//
// Thread safety: any thread may call anything, also while another one waits.
class NcclCommunicator {
 public:
  struct Options {
    std::shared_ptr<const NcclApi> api;
    ncclUniqueId id = {};
    int size = 0;
    int rank = 0;
    int device = 0;  // of CUDA; current in every thread that calls
    std::chrono::nanoseconds timeout{};
  };

  struct Collective {
    void* values = nullptr;
    size_t count = 0;
    ncclDataType_t type = ncclFloat32;
    std::optional<ncclRedOp_t> op;  // of an all-reduce; none: everyone gets rank 0's values
    std::shared_ptr<void> keep;     // owns the values; let go of once the collective has ended
  };

  // Collectives that were begun together, and end together.
  class Group;

  // Meets the other ranks, for at most the timeout.
  explicit NcclCommunicator(Options options);
  // Ends cleanly if everything under way ends soon; else aborts.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Begins them after everything that `stream` has been given. Every rank must give the same groups in the same order:
  // within a group NCCL chooses the order.
  std::shared_ptr<Group> start(std::vector<Collective> collectives, cudaStream_t stream);
  // Lets what `stream` is given after this wait for the group's end.
  void wait(Group& group, cudaStream_t stream);
  // Whether the device has ended it, or it has failed.
  bool is_done(Group& group);

  // A part of the device's memory that collectives work best in.
  class Memory;

  // Memory that is freed with its last owner, which may outlive the communicator. Null where NCCL is too old to have
  // any, and where it has too little left: `failure` then says so. If the first attempt fails, calls `release_cache`,
  // which gives unused memory of other allocators back to the device, and tries again.
  std::shared_ptr<Memory> allocate(size_t bytes, const std::function<void()>& release_cache, std::string& failure);
  // Registers it with the communicator as well as its NCCL can, and returns its address. Every rank must register the
  // same sizes in the same order; waits for the others, for at most the timeout.
  std::shared_ptr<void> register_memory(const std::shared_ptr<Memory>& memory);
  // How the last was registered: "registered window", "registered buffer", "unregistered"; "" if there is none.
  std::string registration() const;

  // The bytes that allocate() has handed out and that are not freed yet, and the most that they have been, of all
  // communicators of this process. No statistics of torch's allocator count them.
  static int64_t memory_bytes();
  static int64_t most_memory_bytes();

 private:
  class Handle;

  void watch();
  void note_failures();
  void take_ended(std::vector<std::shared_ptr<Group>>& ended);
  void say_goodbye() noexcept;

  const Options options_;
  const std::shared_ptr<Handle> handle_;  // shared with the memory
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr;  // of the caller's stream, when a group is given
  int64_t num_groups_ = 0;
  std::deque<std::shared_ptr<Group>> under_way_;
  std::string registration_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread watcher_;
};

}  // namespace drivetrain::ddp
