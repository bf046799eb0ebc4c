// Runs torch's communication hooks on buckets.
#include "ddp/transport/comm_hook.h"

#include "base/check.h"
#include "ddp/transport/torch_group.h"

namespace drivetrain::ddp {

HookReduce::HookReduce(c10d::CommHookInterface& hook, const HookBucket& bucket) : hook_(hook) {
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  for (const at::Tensor& param : bucket.params) {
    lengths.push_back(static_cast<size_t>(param.numel()));
    sizes.push_back(param.sizes());
  }
  c10d::GradBucket grads(bucket.index, bucket.count, bucket.flat, bucket.offsets, lengths, sizes, bucket.params,
                         std::nullopt);
  future_ = hook_.runHook(grads);
  DT_INVARIANT(future_ != nullptr);
}

void HookReduce::wait() {
  if (result_.defined()) return;
  future_->wait();
  result_ = hook_.parseHookResult(future_->value());  // rethrows an error that the future holds
}

bool HookReduce::wait_for(std::chrono::milliseconds limit) {
  if (!result_.defined() && !ddp::wait_for(*future_, limit)) return false;
  wait();
  return true;
}

}  // namespace drivetrain::ddp
