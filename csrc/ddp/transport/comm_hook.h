// Communication hooks: torch's own kind of hook, run on our buckets as real c10d::GradBuckets.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

// What a hook gets to see of a bucket.
struct HookBucket {
  size_t index;
  size_t count;                 // of buckets
  at::Tensor flat;              // in the parameters' dtype; the gradient itself if it is sparse
  std::vector<size_t> offsets;  // elements, into flat
  std::vector<at::Tensor> params;
};

// One hook under way. After wait(), result() is what the hook's future holds: flat itself, or a tensor of as many
// elements in whatever dtype the hook chose.
class HookReduce final : public PendingReduce {
 public:
  // Runs the hook; it may raise, and it takes the GIL if it is a Python function.
  HookReduce(c10d::CommHookInterface& hook, const HookBucket& bucket);
  void wait() override;
  bool is_done() override { return result_.defined() || future_->completed(); }
  const at::Tensor& result() const { return result_; }

 private:
  c10d::CommHookInterface& hook_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  at::Tensor result_;
};

}  // namespace drivetrain::ddp
