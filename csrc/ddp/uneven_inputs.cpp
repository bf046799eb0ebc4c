// Takes part in the steps of ranks that still have inputs.
#include "ddp/uneven_inputs.h"

#include <ATen/core/grad_mode.h>

#include "ddp/reducer_parts.h"
#include "ddp/tensors.h"

namespace drivetrain::ddp {

void UnevenInputs::set_joining(int64_t divisor) {
  is_joining_ = true;
  divisor_ = divisor;
}

void UnevenInputs::end_step() {
  is_joining_ = false;
  divisor_ = 0;
}

void UnevenInputs::shadow_planning() {
  const at::NoGradGuard no_grad_tracking;
  parts_.errors.note([&] { parts_.rebuild_buckets(); });
}

std::unique_ptr<PendingReduce> UnevenInputs::reduce_zeros(size_t index, bool as_sum) {
  GradBuffer& buffer = parts_.buffer;
  Bucket& bucket = buffer.bucket(index);
  if (bucket.sparse) {
    bucket.flat = no_rows(parts_.params[bucket.params[0]].tensor);
  } else {
    kept_.resize(buffer.buckets().size());
    for (size_t param : bucket.params) {
      const at::Tensor& grad = parts_.params[param].tensor.grad();
      if (!kept_[index].defined() && grad.defined() && buffer.is_in_place(param, grad)) {
        kept_[index] = bucket.flat.clone();
      }
      buffer.leave_to_holders(param);
    }
    bucket.flat.zero_();
  }
  Scaling scaling;
  scaling.purpose = parts_.bucket_purpose();
  scaling.as_sum = as_sum || !parts_.collectives.comm().averages();
  parts_.queue.scaling() = scaling;
  if (index == 0) {  // as the others do, where their backward begins
    parts_.replicas.begin_step(/*is_joining=*/true);
    parts_.check.begin_step(/*is_joining=*/true);
    parts_.promise_collectives();
  }
  parts_.queue.start(index);
  return parts_.queue.take_pending(index);
}

void UnevenInputs::wait_for_zeros(size_t index, PendingReduce& reduce) {
  parts_.errors.note([&] {
    parts_.queue.wait_for(index, reduce);
    if (index >= kept_.size() || !kept_[index].defined()) return;
    parts_.buffer.bucket(index).flat.copy_(
        kept_[index]);  // as in torch, this rank keeps the gradients of its last step
    kept_[index] = at::Tensor();
  });
}

void UnevenInputs::shadow_used_map() { parts_.used.shadow(parts_.queue.last_position()); }

void UnevenInputs::count_shadowed_step() {
  parts_.planner.miss_times();
  parts_.collectives.count_step();
  parts_.reset();
}

}  // namespace drivetrain::ddp
