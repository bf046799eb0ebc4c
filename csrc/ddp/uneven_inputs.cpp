// Implements what a rank without inputs does while others still train: the same collectives in the same order.
#include <ATen/core/grad_mode.h>

#include "ddp/reducer.h"
#include "ddp/tensors.h"

namespace drivetrain::ddp {

void Reducer::shadow_planning() {
  const Lock lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  errors_.note([&] { rebuild_buckets(); });
}

std::unique_ptr<PendingReduce> Reducer::reduce_zeros(size_t index, bool as_sum) {
  const Lock lock(mutex_);
  Bucket& bucket = buffer_.bucket(index);
  if (bucket.sparse) {
    bucket.flat = no_rows(params_[bucket.params[0]].tensor);
  } else {
    uneven_.kept.resize(buffer_.buckets().size());
    for (size_t param : bucket.params) {
      const at::Tensor& grad = params_[param].tensor.grad();
      if (!uneven_.kept[index].defined() && grad.defined() && buffer_.is_in_place(param, grad)) {
        uneven_.kept[index] = bucket.flat.clone();
      }
      buffer_.leave_to_holders(param);
    }
    bucket.flat.zero_();
  }
  Scaling scaling;
  scaling.purpose = bucket_purpose();
  scaling.as_sum = as_sum || !collectives_.comm().averages();
  queue_.scaling() = scaling;
  if (index == 0) {  // as the others do, where their backward begins
    for (SideSum* sum : side_sums_) sum->begin_step(kind_, /*is_joining=*/true);
    promise_collectives();
  }
  queue_.start(index);
  return queue_.take_pending(index);
}

void Reducer::wait_for_zeros(size_t index, PendingReduce& reduce) {
  const Lock lock(mutex_);
  errors_.note([&] {
    queue_.wait_for(index, reduce);
    if (index >= uneven_.kept.size() || !uneven_.kept[index].defined()) return;
    buffer_.bucket(index).flat.copy_(
        uneven_.kept[index]);  // as in torch, this rank keeps the gradients of its last step
    uneven_.kept[index] = at::Tensor();
  });
}

void Reducer::end_shadowed_step() {
  const Lock lock(mutex_);
  used_.shadow(queue_.last_position());
  planner_.miss_times();
  collectives_.count_step();
  reset();
}

}  // namespace drivetrain::ddp
