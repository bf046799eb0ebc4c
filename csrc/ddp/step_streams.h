// Declares the order of a device's streams in a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

#include "ddp/parameter.h"

namespace drivetrain::ddp {

// Autograd runs hooks on the streams of the gradient accumulators, which may be several, and a bucket is reduced from
// one stream.
//
// Invariant: work that a stream gets after note() or join() runs after all earlier work of the step's other streams. On
// the CPU all methods do nothing.
class StepStreams {
 public:
  explicit StepStreams(const Parameters& params) : params_(params) {}
  // Adds the device's current stream to the step's streams. Its next work runs after the work of the others so far,
  // such as the allocation of a new buffer.
  void note(c10::Device device);
  // Adds the current stream, and orders its next work after the work of all others so far even if it was known.
  void join(c10::Device device);
  // Orders the current stream's next work after the accumulators' streams. Autograd orders writes to `.grad` outside
  // of hooks with these streams only.
  void wait_for_accumulators() const;
  // Orders the accumulators' streams after the current stream.
  void let_accumulators_wait() const;
  // Keeps memory that is about to be freed from reuse until the step's streams have done their work so far.
  void keep_alive(const at::Tensor& memory) const;
  void reset() { streams_.clear(); }

 private:
  void wait_for_others(c10::Device device) const;
  std::vector<c10::Stream> streams_of_accumulators() const;

  const Parameters& params_;
  std::vector<c10::Stream> streams_;  // gradients of this step came, or entered buckets, on these
};

}  // namespace drivetrain::ddp
