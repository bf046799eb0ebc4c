// What is on the host instead of a device's memory, and its way there and back beside the device's work.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "saved_tensors/host_pool.h"

namespace drivetrain::saved_tensors {

// Each device has two streams for copies, out and in. The host waits for none of them: streams wait for each other's
// events. On the CPU, copies go to the pool's memory and back at once. One thread at a time.
class Offloaded {
 public:
  // Of a contiguous tensor in one dimension. The copy starts after what the current stream has enqueued so far. The
  // caller may free the tensor at once: torch's allocator is told that the copy reads its memory (recordStream), and
  // gives it to others when the copy has ended. That memory may come back a little later than the current stream would
  // have it; an event in its place would make the current stream wait for every copy. Before anything else writes to
  // the tensor's memory, call await_copy_out(): the copy may still be reading it.
  static Offloaded begin(const std::shared_ptr<HostPool>& pool, const at::Tensor& flat);

  Offloaded(Offloaded&&) noexcept = default;
  Offloaded& operator=(Offloaded&&) = delete;
  ~Offloaded();  // any time, with copies under way

  // The current stream waits until the copy out has read the tensor: what it enqueues next may write there.
  void await_copy_out() const;

  // The copy back starts, into memory of the current stream: after what that has enqueued so far, which may use what
  // the memory was before, and after the copy out. A second one does nothing.
  void prefetch();

  // The tensor as it was; the current stream waits for the copy, and prefetch() is called if it was not. The host's
  // copy stays: another call brings it back once more.
  at::Tensor take();

  int64_t nbytes() const { return memory_.bytes().numel(); }

 private:
  Offloaded(std::shared_ptr<HostPool> pool, const at::Tensor& flat);
  at::Tensor on_host() const;

  std::shared_ptr<HostPool> pool_;
  at::TensorOptions options_;
  int64_t numel_;
  HostPool::Memory memory_;

  std::shared_ptr<const c10::Event> copied_out_;  // none on the CPU
  at::Tensor on_device_;                          // prefetched
  std::optional<c10::Stream> stream_;             // of its memory; none on the CPU
  std::shared_ptr<const c10::Event> copied_back_;
};

}  // namespace drivetrain::saved_tensors
