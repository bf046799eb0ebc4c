// Starts, awaits and hands over the buckets of a step.
#include "ddp/bucket_queue.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "base/check.h"
#include "base/stream_order.h"
#include "base/torch_text.h"
#include "ddp/errors.h"
#include "ddp/replicas.h"
#include "ddp/tensors.h"

namespace drivetrain::ddp {

void BucketQueue::set_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  if (hook_) {
    throw EnvironmentError(
        "register_comm_hook or register_builtin_comm_hook can only be called once: this DistributedDataParallel has a "
        "communication hook already.");
  }
  hook_ = std::move(hook);
}

void BucketQueue::reset() {
  const std::vector<Bucket>& buckets = parts_.buffer.buckets();
  states_.resize(buckets.size());
  for (size_t i = 0; i < states_.size(); ++i) {
    State& state = states_[i];
    state.missing = buckets[i].params.size();
    state.phase = Phase::kFilling;
    state.hooked = nullptr;
    state.is_divided = false;
    state.reduce.reset();
  }
  next_ = next_to_hand_over_ = 0;
}

// ---- Start.

void BucketQueue::add(size_t param) {
  State& state = states_[parts_.buffer.region(param).bucket];
  if (!parts_.buffer.settings.reuses_memory) put_in(param);
  DT_INVARIANT(state.missing > 0);
  if (--state.missing == 0) state.phase = Phase::kFull;
}

void BucketQueue::put_in(size_t param) {
  parts_.gradients.put_in(param, parts_.params[param].sparse ? scaling_.before_sparse : scaling_.before);
  parts_.part_sums.add_to(param, parts_.buffer.region(param).view);
}

bool BucketQueue::start_full() {
  if (have_all_started()) return false;
  while (next_ < states_.size() && states_[next_].phase == Phase::kFull) {
    if (next_ == 0) parts_.times.comm_start = clock_ns();
    start(next_);
    ++next_;
  }
  return have_all_started();
}

void BucketQueue::start(size_t index) {
  states_[index].phase = Phase::kReducing;
  const Bucket& bucket = parts_.buffer.bucket(index);
  // The gradients of the bucket and of buckets that are held back with it may have come on several streams.
  parts_.streams.join(parts_.params[bucket.params[0]].tensor.device());
  if (parts_.buffer.settings.reuses_memory) {
    make_room_for(index);
    for (size_t param : bucket.params) put_in(param);
  }
  if (!is_skipped(index)) {
    parts_.check.check(index);
    parts_.noise.add(bucket, scaling_.before);
    compare_changes(index);
    reduce(index);
  }
  if (!bucket.ends_group) return;
  try {
    parts_.collectives.comm().flush();
  } catch (const std::exception& error) {
    std::string what = *bucket.label;
    for (size_t i = index; i > 0 && !parts_.buffer.bucket(i - 1).ends_group; --i) {
      what = *parts_.buffer.bucket(i - 1).label + ", " + what;
    }
    parts_.collectives.fail_step("the all-reduce of " + what, error.what());
  }
}

// The host waits for a device here, which only a hook that changes parameters makes necessary.
void BucketQueue::compare_changes(size_t index) {
  for (const size_t param : parts_.buffer.bucket(index).params) {
    if (!std::exchange(parts_.gradients[param].is_changed, false)) continue;
    const Parameter& of = parts_.params[param];
    const int64_t checksum = hash_of(std::vector<at::Tensor>{of.tensor}).item<int64_t>();
    parts_.collectives.compare_change(param, checksum, consumed_message(of, "was changed"));
  }
}

void BucketQueue::reduce(size_t index) {
  Bucket& bucket = parts_.buffer.bucket(index);
  State& state = states_[index];
  RECORD_FUNCTION("drivetrain::all_reduce", (std::vector<c10::IValue>{bucket.flat, static_cast<int64_t>(index)}));
  ++parts_.times.buckets_reduced;
  // A hook may wait in here, and so may a transport that has too many buckets in progress.
  const Progress::Wait wait(*parts_.collectives.progress(), bucket.label, Progress::after_bucket(index));
  const Stopwatch stopwatch(parts_.times.exposed);
  if (hook_) {
    if (!bucket.sparse) show(bucket.flat, bucket.seen, parts_.buffer.settings.stays_views);
    HookBucket seen{index, states_.size(), bucket.sparse ? bucket.flat : bucket.seen, {}, {}};
    for (size_t param : bucket.params) {
      if (!bucket.sparse) seen.offsets.push_back(parts_.buffer.region(param).offset / bucket.flat.element_size());
      seen.params.push_back(parts_.params[param].tensor);
    }
    parts_.collectives.announce(scaling_.purpose, "the communication hook of " + *bucket.label, index);
    auto reduce = std::make_unique<HookReduce>(*hook_, seen);
    state.hooked = reduce.get();
    state.reduce = std::move(reduce);
  } else if (parts_.collectives.comm().size() > 1 || parts_.collectives.comm().is_foreign()) {
    const at::Tensor flat = as_real(bucket.flat);
    try {
      const bool as_sum = scaling_.as_sum || bucket.sparse;
      std::optional<double> weight = bucket.sparse || bucket.flat.is_complex() ? std::nullopt : scaling_.weight;
      state.reduce = parts_.collectives.start_bucket(flat, index, as_sum, scaling_.purpose, bucket.ranges, weight);
      state.is_divided = weight.has_value();
    } catch (const std::exception& error) {
      parts_.collectives.fail_step("the all-reduce of " + *bucket.label, error.what());
    }
  }
}

bool BucketQueue::is_skipped(size_t bucket) const {
  if (!parts_.skips_unused || scaling_.takes_all) return false;
  for (size_t param : parts_.buffer.buckets()[bucket].params) {
    if (!parts_.gradients[param].without_grad) return false;
  }
  return true;
}

// ---- Wait.

void BucketQueue::wait_for(size_t bucket, PendingReduce& reduce) {
  parts_.collectives.wait(reduce, parts_.buffer.bucket(bucket).label, Progress::after_bucket(bucket));
}

void BucketQueue::wait_for_rest() {
  for (size_t i = next_to_hand_over_; i < states_.size(); ++i) {
    if (!states_[i].reduce) continue;
    RECORD_FUNCTION("drivetrain::wait", std::vector<c10::IValue>{static_cast<int64_t>(i)});
    wait_for(i, *states_[i].reduce);
  }
}

void drain(PendingReduce* reduce) {
  if (reduce == nullptr || reduce->is_held_back()) return;
  try {
    reduce->wait();
  } catch (const std::exception& error) {
    TORCH_WARN("drivetrain: in a step that is given up, a reduction has failed: ", error.what());
  }
}

void BucketQueue::drain() const {
  for (const State& state : states_) ddp::drain(state.reduce.get());
}

// ---- Communication hooks.

void BucketQueue::take_hook_results() {
  for (size_t i = next_to_hand_over_; i < states_.size(); ++i) take_hook_result(i);
}

void BucketQueue::take_hook_result(size_t index) {
  if (states_[index].hooked == nullptr) return;
  const Bucket& bucket = parts_.buffer.bucket(index);
  const at::Tensor& result = states_[index].hooked->result();
  if (bucket.sparse) {
    if (!result.is_same(bucket.flat)) bucket.flat.copy_(result);
    return;
  }
  const int64_t numel = bucket.flat.numel();
  const auto has = static_cast<int64_t>(result.storage().nbytes() / result.element_size());
  if (has < numel) {
    throw EnvironmentError(text("the communication hook returned a tensor over ", has, " elements for ", *bucket.label,
                                ", expected as many as bucket.buffer() has: ", numel));
  }
  // torch takes the first elements of the storage, whatever part of it the tensor shows.
  const at::Tensor values = result.as_strided({numel}, {1}, 0);
  const bool is_same_type = values.scalar_type() == bucket.flat.scalar_type();
  if (is_same_type && values.const_data_ptr() == bucket.flat.const_data_ptr()) return;
  const bool may_overlap = parts_.buffer.settings.stays_views && values.is_alias_of(bucket.seen);
  bucket.flat.copy_(may_overlap ? values.clone() : values);
  if (parts_.buffer.settings.low_precision.has_value()) parts_.gradients.copy_to_full_precision(bucket, values);
}

// ---- Hand over.

bool BucketQueue::can_hand_over_early() const {
  return on_reduced_ && !parts_.used.is_due() && !parts_.skips_unused &&
         !parts_.buffer.settings.low_precision.has_value() && !parts_.gradients.store().is_context();
}

// Waits for the first `waits_for` buckets; of the others it takes those that are reduced.
void BucketQueue::hand_over_reduced(size_t waits_for) {
  if (!can_hand_over_early()) return;
  const bool may_ask = !is_capturing_on(parts_.params[0].tensor.device());
  while (next_to_hand_over_ < next_) {
    const size_t index = next_to_hand_over_;
    if (PendingReduce* const reduce = states_[index].reduce.get()) {
      const bool is_there = may_ask && !reduce->is_held_back() && reduce->is_done();
      if (!is_there && index >= waits_for) return;
      wait_for(index, *reduce);
      take_hook_result(index);
    }
    for (size_t param : parts_.buffer.bucket(index).params) {
      parts_.gradients.hand_back(param, parts_.used.is_used(param));
    }
    hand_over_next();
  }
}

// Hands over buckets until none lies where this bucket's gradients will lie.
void BucketQueue::make_room_for(size_t index) {
  const Bucket& bucket = parts_.buffer.bucket(index);
  size_t waits_for = next_to_hand_over_;
  for (size_t i = next_to_hand_over_; i < index && !bucket.sparse; ++i) {
    const Bucket& before = parts_.buffer.bucket(i);
    const bool is_apart = before.sparse || before.flat.device() != bucket.flat.device() ||
                          before.end <= bucket.offset || bucket.end <= before.offset;
    if (!is_apart) waits_for = i + 1;
  }
  if (waits_for > next_to_hand_over_) hand_over_reduced(waits_for);
  DT_INVARIANT(next_to_hand_over_ >= waits_for);
}

void BucketQueue::hand_over_next() {
  const std::vector<size_t>& params = parts_.buffer.bucket(next_to_hand_over_++).params;
  try {
    if (!hand_over_error_) on_reduced_(params, next_to_hand_over_ == states_.size());
  } catch (...) {
    hand_over_error_ = std::current_exception();
  }
  for (size_t i = 0; parts_.buffer.settings.reuses_memory && i < params.size(); ++i) {
    at::Tensor& grad = parts_.params[params[i]].tensor.mutable_grad();
    if (grad.defined() && grad.is_same(parts_.buffer.region(params[i]).view))
      grad = grad.clone();  // others will lie there
  }
}

void BucketQueue::hand_over_rest() {
  while (on_reduced_ && next_to_hand_over_ < states_.size()) hand_over_next();
}

}  // namespace drivetrain::ddp
