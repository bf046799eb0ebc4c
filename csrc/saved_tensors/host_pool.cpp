// Reserves, cuts and merges slabs of host memory; see host_pool.h.
#include "saved_tensors/host_pool.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/host_pages.h"
#include "base/page_lock.h"
#include "base/without_gil.h"
#include "base/write_cuda.h"

namespace drivetrain::saved_tensors {
namespace {

constexpr int64_t kAlignment = 512;  // bytes; every piece is aligned for copies of a device

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Sizes of slabs are multiples of a unit, or powers of two for a unit of 0.
int64_t rounded_up(int64_t bytes, int64_t unit) {
  if (unit > 0) return (bytes + unit - 1) / unit * unit;
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
}
int64_t rounded_down(int64_t bytes, int64_t unit) {
  return unit > 0 ? bytes / unit * unit : static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)));
}

void add_uses(StreamUses& to, const StreamUses& from) {
  for (const StreamUse& use : from) {
    const auto same =
        std::find_if(to.begin(), to.end(), [&](const StreamUse& other) { return other.stream == use.stream; });
    if (same == to.end()) {
      to.push_back(use);
    } else if (same->turn < use.turn) {
      *same = use;
    }
  }
}

}  // namespace

HostPool::Memory& HostPool::Memory::operator=(Memory&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(slab_, other.slab_);
  std::swap(offset_, other.offset_);
  std::swap(size_, other.size_);
  std::swap(bytes_, other.bytes_);
  std::swap(uses_, other.uses_);
  return *this;
}

HostPool::Memory::~Memory() {
  if (pool_) pool_->give_back(*this);
}

std::shared_ptr<HostPool> HostPool::make(int64_t max_bytes, int64_t slab_bytes) {
  if (max_bytes < 0) throw UserError(text("max_bytes is ", max_bytes, ", expected 0 or more"));
  if (slab_bytes < kAlignment || !std::has_single_bit(static_cast<uint64_t>(slab_bytes))) {
    throw UserError(text("slab_bytes is ", slab_bytes, ", expected a power of two from ", kAlignment, " on"));
  }
  return std::shared_ptr<HostPool>(new HostPool(max_bytes, slab_bytes));
}

HostPool::~HostPool() {
  without_gil([this] {
    for (const Slab& slab : slabs_) slab.wait();
  });
}

// Waits for copies of devices. Otherwise they would use memory that the system has back.
void HostPool::Slab::wait() const noexcept {
  try {
    const OutsideCaptures outside_captures;
    for (const auto& [offset, piece] : free) {
      for (const StreamUse& use : piece.uses) use.event->synchronize();
    }
  } catch (...) {  // the device has failed, and copies no more
  }
}

HostPool::Memory HostPool::get(int64_t bytes, bool pinned) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Memory memory = cut(bytes, pinned);
  if (!memory.pool_) {
    reserve(bytes, pinned);
    memory = cut(bytes, pinned);
  }
  return memory;
}

// Cuts from the smallest free piece that is large enough. Returns empty memory if there is none.
HostPool::Memory HostPool::cut(int64_t bytes, bool pinned) {
  const int64_t size = std::max(aligned(bytes), kAlignment);
  Slab* slab = nullptr;
  std::map<int64_t, Free>::iterator best;
  for (Slab& candidate : slabs_) {
    if (candidate.pinned != pinned) continue;
    for (auto it = candidate.free.begin(); it != candidate.free.end(); ++it) {
      if (it->second.size < size || (slab != nullptr && it->second.size >= best->second.size)) continue;
      slab = &candidate;
      best = it;
    }
  }
  Memory memory;
  if (slab == nullptr) return memory;
  memory.slab_ = slab;
  memory.offset_ = best->first;
  memory.size_ = size;
  memory.bytes_ = slab->bytes.narrow(0, memory.offset_, bytes);
  memory.uses_ = best->second.uses;
  if (best->second.size > size) {
    slab->free.emplace(memory.offset_ + size, Free{best->second.size - size, memory.uses_});
  }
  slab->free.erase(best);
  stats_.bytes_in_use += size;
  stats_.peak_bytes_in_use = std::max(stats_.peak_bytes_in_use, stats_.bytes_in_use);
  memory.pool_ = shared_from_this();
  return memory;
}

// Reserves a slab with room for that many bytes. It is smaller than slab_bytes if the limit demands it.
void HostPool::reserve(int64_t bytes, bool pinned) {
  const bool is_own = pinned && can_lock_pages() && at::hasCUDA();  // torch locks pages for other devices
  const int64_t unit = is_own ? ::sysconf(_SC_PAGESIZE) : 0;
  const int64_t least = rounded_up(std::max(aligned(bytes), kAlignment), unit);
  release_unused(least);
  const int64_t left = rounded_down(max_bytes_ - stats_.bytes_reserved, unit);
  if (least > left) {
    throw UserError(text("max_bytes is ", max_bytes_, ", and offloading ", bytes, " bytes more needs at least ",
                         stats_.bytes_reserved + least, ": ", stats_.bytes_reserved, " are reserved, ",
                         stats_.bytes_in_use, " of them in use. Raise the limit, or offload less."));
  }
  const int64_t size = std::min(std::max(least, slab_bytes_), left);
  Slab slab{{}, pinned, {}};
  if (is_own) {
    const std::shared_ptr<HostPages> pages = HostPages::make(size);
    pages->lock(size);  // if CUDA refuses, copies wait
    slab.bytes = pages->tensor();
  } else {
    slab.bytes = at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(pinned));
  }
  slab.free.emplace(0, Free{size, {}});
  slabs_.push_back(std::move(slab));
  stats_.bytes_reserved += size;
  ++stats_.num_slabs;
}

// Frees unused slabs until the wanted bytes fit under the limit.
void HostPool::release_unused(int64_t wanted) {
  for (auto slab = slabs_.begin(); slab != slabs_.end() && stats_.bytes_reserved + wanted > max_bytes_;) {
    if (slab->is_unused()) {
      slab->wait();
      stats_.bytes_reserved -= slab->bytes.numel();
      slab = slabs_.erase(slab);
    } else {
      ++slab;
    }
  }
}

void HostPool::give_back(Memory& memory) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<int64_t, Free>& free = static_cast<Slab*>(memory.slab_)->free;
  stats_.bytes_in_use -= memory.size_;
  auto piece = free.emplace(memory.offset_, Free{memory.size_, std::move(memory.uses_)}).first;
  const auto join_next = [&free](std::map<int64_t, Free>::iterator it) {
    const auto next = std::next(it);
    if (next == free.end() || it->first + it->second.size != next->first) return;
    it->second.size += next->second.size;
    add_uses(it->second.uses, next->second.uses);
    free.erase(next);
  };
  join_next(piece);
  if (piece != free.begin()) join_next(std::prev(piece));
}

void HostPool::count_copy(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.num_copies;
  stats_.bytes_copied += bytes;
}

HostPoolStats HostPool::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace drivetrain::saved_tensors
