// Declares the reduction of a bucket by a communication hook of torch's type, which gets a real c10d::GradBucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

// The parts of a bucket that a hook sees.
struct HookBucket {
  size_t index;
  size_t count;                 // number of buckets
  at::Tensor flat;              // in the parameters' dtype, without gaps; the gradient itself if it is sparse
  std::vector<size_t> offsets;  // elements, into flat; none if it is sparse
  std::vector<at::Tensor> params;
};

// Gives a hook the values of `flat` in `seen`, which it may write, resize or set. Replaces `seen` after that.
// shares_memory: `seen` shows the memory of `flat`, unless the hook moves it, as with gradient_as_bucket_view=True.
void show(const at::Tensor& flat, at::Tensor& seen, bool shares_memory);

// One run of a hook. After wait(), result() is the value of the hook's future: flat itself, or a tensor of any dtype
// whose storage begins with the result.
class HookReduce final : public PendingReduce {
 public:
  // Runs the hook. It may raise, and takes the GIL if it is a Python function.
  HookReduce(c10d::CommHookInterface& hook, const HookBucket& bucket);
  void wait() override;
  bool wait_for(std::chrono::milliseconds limit) override;
  bool is_done() override { return result_.defined() || future_->completed(); }
  const at::Tensor& result() const { return result_; }

 private:
  c10d::CommHookInterface& hook_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  at::Tensor result_;
};

}  // namespace drivetrain::ddp
