// Host memory for activations: slabs that are cut up, given back and cut up again from step to step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace drivetrain::saved_tensors {

// All that a stream had enqueued up to an event, some of which may still read or write a piece of memory.
struct Use {
  c10::Stream stream;
  uint64_t turn;  // of that stream's events: a later one says more
  std::shared_ptr<const c10::Event> event;
};

// One per stream.
using Uses = std::vector<Use>;

struct HostPoolStats {
  int64_t bytes_in_use;
  int64_t peak_bytes_in_use;
  int64_t bytes_reserved;
  int64_t num_slabs;  // reserved so far, which a steady step leaves as it is
  int64_t num_copies;
  int64_t bytes_copied;
};

// Slabs are powers of two, as torch's allocator of pinned memory makes them anyway. A piece is cut from the smallest
// free one that is large enough, and grows together with its free neighbours when it is given back: at once, whatever
// devices still do with it, as the next owner's copy waits for that on its stream. So what a step finds free depends on
// the order of calls alone, and one like the last reserves nothing. Any thread may call.
class HostPool : public std::enable_shared_from_this<HostPool> {
 public:
  // A piece of a slab, given back by its end.
  class Memory {
   public:
    Memory() = default;
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept;
    ~Memory();

    const at::Tensor& bytes() const { return bytes_; }
    const Uses& uses() const { return uses_; }  // before the first write: those of former owners
    // What the next owner waits for: it must have followed all uses so far.
    void set_last_use(Use last_use) { uses_ = {std::move(last_use)}; }

   private:
    friend class HostPool;
    std::shared_ptr<HostPool> pool_;
    void* slab_ = nullptr;
    int64_t offset_ = 0, size_ = 0;
    at::Tensor bytes_;
    Uses uses_;
  };

  // max_bytes: of what is reserved; slab_bytes: of the smallest slab, a power of two.
  static std::shared_ptr<HostPool> make(int64_t max_bytes, int64_t slab_bytes);

  // pinned: for copies of a device. Throws UserError beyond the limit, and says how much would do.
  Memory get(int64_t bytes, bool pinned);

  void count_copy(int64_t bytes);

  HostPoolStats stats() const;
  int64_t max_bytes() const { return max_bytes_; }

 private:
  struct Free {
    int64_t size;
    Uses uses;
  };
  struct Slab {
    at::Tensor bytes;
    bool pinned;
    std::map<int64_t, Free> free;  // by offset; no two of them touch

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
