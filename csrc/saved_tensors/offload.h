// Declares Offloaded, a tensor in host memory, which is copied there and back during the device's work.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "saved_tensors/host_pool.h"

namespace drivetrain::saved_tensors {

// Each device has one stream for copies to the host and one for copies back. Streams wait for each other's events, and
// the host waits for none. Tensors on the CPU are copied at once. Not thread-safe.
class Offloaded {
 public:
  // Starts to copy a contiguous tensor of one dimension to the host, after the work that the current stream has so far.
  // The caller may free the tensor at once, because recordStream tells torch's allocator that the copy reads its
  // memory. The allocator may therefore reuse it a little later; an event instead would make the current stream wait
  // for every copy. Call await_copy_out() before anything else writes to the memory.
  static Offloaded begin(const std::shared_ptr<HostPool>& pool, const at::Tensor& flat);

  Offloaded(Offloaded&&) noexcept = default;
  Offloaded& operator=(Offloaded&&) = delete;
  ~Offloaded();  // copies may be in progress

  // Makes the current stream wait until the copy to the host has read the tensor. Its later work may write there.
  void await_copy_out() const;

  // Starts the copy back, into memory of the current stream. It waits for the copy to the host, and for the work that
  // the current stream has so far, which may still use that memory. A second call does nothing.
  void prefetch();

  // Returns the tensor on its device. Calls prefetch() unless that was done, and makes the current stream wait for the
  // copy. The copy on the host stays, so that take() may be called again.
  at::Tensor take();

  // Returns the copy on the host. The host waits until copies to and from it have ended, and may then write to it.
  at::Tensor host() const;

  // Starts a copy of the host's values into a contiguous tensor of one dimension on the same device. It waits for no
  // work of the current stream, so that it overlaps: the host must have waited for what uses that tensor.
  void copy_back_to(const at::Tensor& flat);
  // Makes the current stream wait for that copy.
  void await_copy_back() const;
  // Returns whether no copy back is in progress.
  bool is_back() const { return !copied_back_ || copied_back_->query(); }

  int64_t nbytes() const { return memory_.bytes().numel(); }

 private:
  Offloaded(std::shared_ptr<HostPool> pool, const at::Tensor& flat);
  at::Tensor on_host() const;

  std::shared_ptr<HostPool> pool_;
  at::TensorOptions options_;
  int64_t numel_;
  HostPool::Memory memory_;

  std::shared_ptr<const DeviceEvent> copied_out_;  // null for tensors on the CPU
  at::Tensor on_device_;                           // prefetched
  std::optional<c10::Stream> stream_;              // the stream that owns its memory; none on the CPU
  std::shared_ptr<const DeviceEvent> copied_back_;
};

}  // namespace drivetrain::saved_tensors
