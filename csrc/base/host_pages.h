// Declares HostPages, host memory for copies of devices that goes back to the system at its end.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace drivetrain {

// A mapping of whole pages, which CUDA page-locks piece by piece. torch's allocator of pinned memory would take a power
// of two of bytes, and keep them.
class HostPages : public std::enable_shared_from_this<HostPages> {
 public:
  static std::shared_ptr<HostPages> make(int64_t bytes);  // throws std::bad_alloc
  // Unlocks and unmaps. No copy may still use the memory.
  ~HostPages();
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  // Page-locks up to that many further bytes at once. Returns false if CUDA refuses. Call it in one thread at a time.
  bool lock(int64_t bytes);
  // Returns all bytes as a tensor, which keeps the memory. To drop it needs no GIL.
  at::Tensor tensor();

  int64_t size() const { return size_; }
  int64_t locked_bytes() const;
  bool has_tensors() const { return weak_from_this().use_count() > 1; }  // for an owner that has no copy of its pointer

 private:
  explicit HostPages(int64_t bytes);

  int64_t size_;
  char* begin_;
  std::vector<int64_t> ends_;  // of the pieces that are locked
};

}  // namespace drivetrain
