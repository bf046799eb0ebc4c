// Declares HostPool, which reuses host memory for offloaded activations from step to step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/device_event.h"

namespace drivetrain::saved_tensors {

// The work of a stream up to an event, some of which may still read or write a piece of memory.
struct StreamUse {
  c10::Stream stream;
  uint64_t turn;  // numbers the events of the stream: a later event covers earlier ones
  std::shared_ptr<const DeviceEvent> event;
};

// At most one per stream.
using StreamUses = std::vector<StreamUse>;

struct HostPoolStats {
  int64_t bytes_in_use;
  int64_t peak_bytes_in_use;
  int64_t bytes_reserved;
  int64_t num_slabs;  // reserved since construction; constant when steps repeat
  int64_t num_copies;
  int64_t bytes_copied;
};

// Slabs for CUDA are whole pages, which the pool page-locks itself: torch's allocator would round to powers of two and
// return nothing. Other slabs have a power of two of bytes. The pool cuts a piece from the smallest free one that is
// large enough, and merges it with its free neighbors when it is returned. It is free at once, even if a device still
// uses it, because the stream of the next owner waits for that use. Therefore the layout depends only on the order of
// calls, and a step that repeats the last one reserves nothing. Thread-safe.
class HostPool : public std::enable_shared_from_this<HostPool> {
 public:
  // A piece of a slab, which the destructor returns to the pool.
  class Memory {
   public:
    Memory() = default;
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept;
    ~Memory();

    const at::Tensor& bytes() const { return bytes_; }
    const StreamUses& uses() const { return uses_; }  // before the first write: by former owners
    // Sets the use that the next owner waits for. The stream must have waited for all earlier uses.
    void set_last_use(StreamUse last_use) { uses_ = {std::move(last_use)}; }

   private:
    friend class HostPool;
    std::shared_ptr<HostPool> pool_;
    void* slab_ = nullptr;
    int64_t offset_ = 0, size_ = 0;
    at::Tensor bytes_;
    StreamUses uses_;
  };

  HostPool(const HostPool&) = delete;
  ~HostPool();

  // max_bytes: the limit on reserved bytes. slab_bytes: the size of the smallest slab, a power of two.
  static std::shared_ptr<HostPool> make(int64_t max_bytes, int64_t slab_bytes);

  // Returns at least that many bytes. `pinned` is for copies of a device. Throws UserError beyond the limit, and says
  // which limit suffices.
  Memory get(int64_t bytes, bool pinned);

  void count_copy(int64_t bytes);

  HostPoolStats stats() const;
  int64_t max_bytes() const { return max_bytes_; }

 private:
  struct Free {
    int64_t size;
    StreamUses uses;
  };
  struct Slab {
    at::Tensor bytes;
    bool pinned;
    std::map<int64_t, Free> free;  // by offset; two free pieces never touch

    void wait() const noexcept;
    bool is_unused() const { return free.size() == 1 && free.begin()->second.size == bytes.numel(); }
  };

  HostPool(int64_t max_bytes, int64_t slab_bytes) : max_bytes_(max_bytes), slab_bytes_(slab_bytes) {}

  Memory cut(int64_t bytes, bool pinned);
  void reserve(int64_t bytes, bool pinned);
  void release_unused(int64_t wanted);
  void give_back(Memory& memory) noexcept;

  const int64_t max_bytes_, slab_bytes_;
  mutable std::mutex mutex_;
  std::list<Slab> slabs_;
  HostPoolStats stats_ = {};
};

}  // namespace drivetrain::saved_tensors
