// Runs torch's communication hooks on buckets.
#include "ddp/transport/comm_hook.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Allocator.h>

#include "base/check.h"
#include "ddp/transport/torch/torch_group.h"

namespace drivetrain::ddp {

void show(const at::Tensor& flat, at::Tensor& seen, bool shares_memory) {
  const bool is_intact = seen.defined() && seen.sizes().equals(flat.sizes()) && seen.is_contiguous() &&
                         seen.scalar_type() == flat.scalar_type() && seen.storage().nbytes() >= flat.nbytes();
  if (!shares_memory) {
    if (!is_intact) seen = at::empty_like(flat);
    seen.copy_(flat);
    return;
  }
  if (is_intact && seen.const_data_ptr() == flat.const_data_ptr()) return;
  seen = at::empty({0}, flat.options());  // for a storage with torch's allocator
  const auto keep_memory = [flat](void*) {};
  const c10::Storage storage = seen.storage();
  storage.set_data_ptr_noswap(
      c10::InefficientStdFunctionContext::makeDataPtr(flat.data_ptr(), keep_memory, flat.device()));
  storage.set_nbytes(flat.nbytes());
  seen.resize_({flat.numel()});
}

HookReduce::HookReduce(c10d::CommHookInterface& hook, const HookBucket& bucket) : hook_(hook) {
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  for (size_t i = 0; i < bucket.offsets.size(); ++i) {
    const at::Tensor& param = bucket.params[i];
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
