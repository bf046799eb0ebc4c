// Assembles the parts of a reducer, and implements its settings and what concerns all parts.
#include "ddp/reducer_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "base/check.h"
#include "base/heap.h"
#include "base/stream_order.h"
#include "base/write_cuda.h"

namespace drivetrain::ddp {
namespace {

Parameters make_params(std::vector<at::Tensor> tensors, std::vector<std::string> names,
                       const std::vector<bool>& sparse) {
  DT_INVARIANT(!tensors.empty() && tensors.size() == names.size() && tensors.size() == sparse.size());
  Parameters params;
  int64_t largest = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    Parameter& param = params.emplace_back();
    param.tensor = std::move(tensors[i]);
    param.name = std::move(names[i]);
    param.sparse = sparse[i];
    param.grad_dtype = param.tensor.grad_dtype().value_or(param.tensor.scalar_type());
    if (param.tensor.is_cpu() && !param.sparse) largest = std::max<int64_t>(largest, param.tensor.nbytes());
  }
  keep_freed_memory(largest);  // a backward frees each gradient once it is in the buffer
  return params;
}

}  // namespace

ReducerState::ReducerState(std::vector<at::Tensor> tensors, std::vector<std::string> names, std::shared_ptr<Comm> comm,
                           ReducerOptions given)
    : options_(std::move(given)),
      params_(make_params(std::move(tensors), std::move(names), options_.sparse)),
      streams_(params_),
      buffer_(params_, streams_, options_.gradients_stay_views),
      gradients_(params_, buffer_, [this] { forget_step(); }),
      part_sums_(params_),
      collectives_(std::move(comm), options_.wrapper),
      used_(params_, gradients_, collectives_, options_.find_unused_parameters),
      weights_(params_, part_sums_, collectives_, [this] { forget_step(); }),
      replicas_(params_, collectives_, options_.check_replicas_every),
      check_(params_, buffer_, collectives_),
      noise_(params_, buffer_, collectives_),
      queue_({params_, buffer_, gradients_, part_sums_, streams_, collectives_, used_, check_, noise_, now_,
              options_.skip_unused_buckets}),
      planner_(params_, buffer_, streams_, collectives_, {options_.bucket_caps, options_.plan_from_measurement}),
      claims_(params_) {
  const auto end_hooked_step = [this] {
    if (!queue_.has_hook()) return false;
    drain();  // the other ranks go on, so that the rest ends
    forget_step();
    return true;
  };
  part_sums_.set_num_parts(options_.logical_ranks / collectives_.comm().size());
  collectives_.set_recovery({[this] { forget_step(); }, end_hooked_step});
  planner_.start_over();
  queue_.reset();
}

// ---- Settings.

void ReducerState::set_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::vector<int64_t> first_caps) {
  const Lock lock(mutex_);
  if (phase_ == StepPhase::kRunning) {
    throw EnvironmentError("register_comm_hook was called while a backward runs: call it between two steps.");
  }
  queue_.set_hook(std::move(hook));
  const at::NoGradGuard no_grad_tracking;
  planner_.follow_torch(std::move(first_caps), used_.graph() != Graph::kDynamic);
  queue_.reset();
}

void ReducerState::set_on_reduced(BucketQueue::OnReduced on_reduced) {
  const Lock lock(mutex_);
  queue_.set_on_reduced(std::move(on_reduced));
  const bool reuses = queue_.can_hand_over_early() && used_.graph() == Graph::kDynamic && !buffer_.settings.on_moved &&
                      !collectives_.comm().carries_errors();
  const auto lacks_ranges = [](const Bucket& bucket) { return !bucket.sparse && !bucket.ranges; };
  const bool lacks_any =
      !buffer_.settings.kept.empty() && std::any_of(buffer_.buckets().begin(), buffer_.buckets().end(), lacks_ranges);
  if (reuses == buffer_.settings.reuses_memory && !lacks_any) return;
  const at::NoGradGuard no_grad_tracking;
  reset();
  const std::vector<at::Tensor> kept = buffer_.copy_kept_gradients();
  buffer_.settings.reuses_memory = reuses;
  planner_.use(buffer_.plans());
  if (!reuses) {
    buffer_.put_back(kept);
    return;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    if (kept[i].defined()) params_[i].tensor.mutable_grad() = kept[i];
  }
}

void ReducerState::set_static_graph() {
  const Lock lock(mutex_);
  errors_.note([&] {
    if (queue_.has_on_reduced()) {
      throw EnvironmentError("call _set_static_graph() before optimizer.step_in_backward(), not after.");
    }
    if (!has_begun_) return;
    throw EnvironmentError(
        "_set_static_graph() should be called before training loop starts: pass static_graph=True to "
        "DistributedDataParallel instead.");
  });
  used_.set_graph(Graph::kStaticUnknown);
}

void ReducerState::set_comm(std::shared_ptr<Comm> comm) {
  const Lock lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  std::vector<at::Tensor> kept(params_.size());
  part_sums_.clear();
  if (!connect_) {
    reset();
  } else if (buffer_.settings.on_moved) {
    kept = buffer_.copy_kept_gradients();  // others stay where they are until they come again: the script may hold them
  }
  collectives_.set_comm(std::move(comm));  // the first step of the new group is measured again
  part_sums_.set_num_parts(options_.logical_ranks / collectives_.comm().size());
  buffer_.free();
  planner_.start_over();
  queue_.reset();
  buffer_.put_back(kept);
  connect_ = {};
}

void ReducerState::set_kept(std::vector<RankRanges> kept) {
  const Lock lock(mutex_);
  DT_INVARIANT(kept.size() == params_.size());
  buffer_.settings.kept = std::move(kept);
}

void ReducerState::set_put_aside(std::function<void()> put_aside) {
  const Lock lock(mutex_);
  put_aside_ = std::move(put_aside);
  weights_.leave_to_owner();
}

// ---- The step as a whole.

void ReducerState::reset() {
  claims_.release();
  announced_.is_under_way = false;
  kind_ = BackwardKind::kPrepared;
  gradients_.reset();
  queue_.reset();
  streams_.reset();
  for (SideSum* sum : side_sums_) sum->reset();
  uneven_.kept.clear();
  phase_ = StepPhase::kIdle;
  collectives_.move_to(Progress::kIdle);
}

void ReducerState::forget_step() {
  reset();
  for (SideSum* sum : side_sums_) sum->end_step();
  part_sums_.clear();
  uneven_ = {};
  forwards_ = 0;
  end_callbacks_.clear();
  queue_.take_hand_over_error();
}

void ReducerState::drain() const {
  queue_.drain();
  for (const SideSum* sum : side_sums_) ddp::drain(sum->pending());
}

void ReducerState::wait_for_all() {
  RECORD_FUNCTION("drivetrain::wait_for_all_reduces", std::vector<c10::IValue>());
  queue_.wait_for_rest();
  for (SideSum* sum : side_sums_) sum->wait(queue_.last_position());
}

void ReducerState::end_interrupted_step() {
  if (!queue_.have_all_started()) fail_incomplete();
  wait_for_all();
  collectives_.count_step();  // as on ranks where backward did not raise
}

void ReducerState::begin_side_sums() {
  const bool are_used_early = optimizer_in_backward_ || queue_.has_on_reduced() || buffer_.settings.on_moved ||
                              buffer_.settings.low_precision.has_value() || gradients_.store().is_context();
  if (check_.is_on() && are_used_early) {
    throw_unsupported(
        "check_gradients does not go together with step_in_backward(), main_grads(), mixed_precision or distributed "
        "autograd: they use or keep gradients before all ranks know what was found. Leave it out.");
  }
  const bool are_dense = std::find(options_.sparse.begin(), options_.sparse.end(), true) == options_.sparse.end();
  noise_.set_is_plain(!are_used_early && are_dense && !weights_.has_weight());
  for (SideSum* sum : side_sums_) sum->begin_step(kind_, uneven_.is_joining);
}

bool ReducerState::must_drop_gradients() {
  const std::vector<GradientCheck::Finding> found = check_.finish();
  if (found.empty()) return false;
  const std::string what = text(check_.describe(found), ", in synchronized step ", collectives_.steps());
  if (check_.skips()) {
    check_.note_skipped(what);
    return true;
  }
  drop_gradients();
  forget_step();
  throw EnvironmentError(what + ". No rank keeps gradients of this step.");
}

void ReducerState::drop_gradients() {
  for (const Parameter& param : params_) param.tensor.mutable_grad() = at::Tensor();
}

void ReducerState::hand_back_gradients() {
  const bool is_done_elsewhere = optimizer_in_backward_ || buffer_.settings.low_precision.has_value();
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool used_anywhere = used_.find_used(i, queue_.is_skipped(buffer_.region(i).bucket));
    if (!is_done_elsewhere && !queue_.was_handed_over(i)) gradients_.hand_back(i, used_anywhere);
  }
}

void ReducerState::rebuild_buckets() {
  if (const auto call = connect_) {  // set_comm() drops it
    if (const std::string why_not = call(); !why_not.empty()) {
      forget_step();
      throw EnvironmentError(why_not);
    }
  }
  if (planner_.rebuild(used_.may_change(), queue_.has_hook())) queue_.reset();
}

void ReducerState::check_given_up() {
  const std::string why = collectives_.progress()->why_given_up();
  if (why.empty()) return;
  forget_step();
  throw EnvironmentError(why);
}

void ReducerState::check_unconsumed(size_t param, bool came) {
  const bool may_be_consumed =
      buffer_.settings.low_precision.has_value() || optimizer_in_backward_ || gradients_.store().is_context();
  if (may_be_consumed || collectives_.comm().size() == 1) return;
  const Parameter& of = params_[param];
  if (came && !of.tensor.grad().defined()) throw EnvironmentError(consumed_message(of, "lost its gradient"));
  if (of.tensor._version() == gradients_[param].version) return;
  if (!collectives_.can_compare()) throw EnvironmentError(consumed_message(of, "was changed"));
  gradients_[param].is_changed = true;
}

void ReducerState::fail_incomplete() const {
  ddp::fail_incomplete(params_, {collectives_.own_name(), gradients_.missing(), used_.graph() == Graph::kStaticKnown,
                                 options_.find_unused_parameters});
}

at::Tensor ReducerState::free_region(size_t param) {
  const bool is_taken = gradients_[param].ready || !queue_.is_filling(buffer_.region(param).bucket);
  if (params_[param].sparse || is_taken || buffer_.settings.low_precision.has_value() || buffer_.settings.reuses_memory)
    return {};
  if (!buffer_.has_intact_view(param)) return {};
  const at::NoGradGuard no_grad_tracking;
  buffer_.leave_to_holders(param);
  return buffer_.region(param).view;
}

Scaling ReducerState::choose_scaling() const {
  const int64_t size = collectives_.comm().size(), divisor = uneven_.divisor;
  Scaling scaling;
  scaling.purpose = bucket_purpose();
  if (!weights_.has_weight()) {
    if (divisor > 0 && divisor != size) {
      scaling.before = 1.0 / static_cast<double>(divisor);
    } else if (collectives_.comm().averages()) {
      scaling.as_sum = false;
    } else {
      scaling.before = 1.0 / static_cast<double>(size);
    }
    // Transports always sum sparse gradients.
    scaling.before_sparse = 1.0 / static_cast<double>(divisor > 0 ? divisor : size);
  } else {
    scaling.takes_all = true;
    scaling.weight = weights_.of_rank();
  }
  if (queue_.has_hook()) scaling.before = scaling.before_sparse = 1;  // a hook gets sums, and divides
  return scaling;
}

Purpose ReducerState::bucket_purpose() const {
  // Ranks of weight 0 run no backward and match any, so that the sum of weights tells the kinds apart, not the tag.
  if (weights_.has_weight()) return queue_.has_hook() ? Purpose::kHook : Purpose::kWeightedBucket;
  const bool is_prepared = kind_ != BackwardKind::kUnprepared;
  if (queue_.has_hook()) return is_prepared ? Purpose::kHook : Purpose::kUnpreparedHook;
  return is_prepared ? Purpose::kBucket : Purpose::kUnpreparedBucket;
}

void ReducerState::promise_collectives() {
  std::vector<std::pair<Purpose, size_t>> purposes;
  const bool is_reduced = queue_.has_hook() || collectives_.comm().size() > 1;
  for (size_t i = 0; is_reduced && i < buffer_.buckets().size(); ++i) {
    purposes.emplace_back(queue_.scaling().purpose, i);
  }
  for (const SideSum* sum : side_sums_) {
    if (sum->is_due()) purposes.emplace_back(sum->purpose(), 0);
  }
  collectives_.promise(purposes);
}

void ReducerState::mark_end() {
  const std::shared_ptr<Progress>& progress = collectives_.progress();
  progress->end_step();
  const auto stream = stream_on(params_[0].tensor.device());
  if (!stream || is_capturing_on(stream->device())) return;  // replays do not pass here
  if (!device_end_) device_end_ = std::make_shared<DeviceEvent>(stream->device());
  const auto has_ended = [end = device_end_] {
    try {
      const OutsideCaptures outside_captures;  // the watchdog's thread asks, and the training's may capture
      return end->query();
    } catch (const c10::Error&) {
      return true;  // the device has failed, which the training thread finds by itself
    }
  };
  progress->end_on_device([&] { device_end_->record(*stream); }, has_ended);
}

}  // namespace drivetrain::ddp
