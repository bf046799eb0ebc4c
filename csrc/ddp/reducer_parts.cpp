// Assembles the parts of a reducer and implements what concerns all of them.
#include "ddp/reducer_parts.h"

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

ReducerParts::ReducerParts(std::vector<at::Tensor> tensors, std::vector<std::string> names, std::shared_ptr<Comm> comm,
                           ReducerOptions given)
    : options(std::move(given)),
      params(make_params(std::move(tensors), std::move(names), options.sparse)),
      streams(params),
      buffer(params, streams, options.gradients_stay_views),
      gradients(params, buffer, [this] { forget_step(); }),
      collectives(std::move(comm), options.wrapper),
      used(params, gradients, collectives, options.find_unused_parameters),
      weights(params, collectives, [this] { forget_step(); }),
      replicas(params, collectives, options.check_replicas_every),
      check(params, buffer, collectives),
      uneven(*this),
      queue({params, buffer, gradients, streams, collectives, used, check, now, options.skip_unused_buckets}),
      planner(params, buffer, streams, collectives, {options.bucket_caps, options.plan_from_measurement}),
      claims(params) {
  const auto end_hooked_step = [this] {
    if (!queue.has_hook()) return false;
    drain();  // the other ranks go on, so that the rest ends
    forget_step();
    return true;
  };
  collectives.set_recovery({[this] { forget_step(); }, end_hooked_step});
  planner.start_over();
  queue.reset();
}

// ---- Settings.

void ReducerParts::set_on_reduced(BucketQueue::OnReduced on_reduced) {
  queue.set_on_reduced(std::move(on_reduced));
  const bool reuses = queue.can_hand_over_early() && used.graph() == Graph::kDynamic && !buffer.settings.on_moved &&
                      !collectives.comm().carries_errors();
  const auto lacks_ranges = [](const Bucket& bucket) { return !bucket.sparse && !bucket.ranges; };
  const bool lacks_any =
      !buffer.settings.kept.empty() && std::any_of(buffer.buckets().begin(), buffer.buckets().end(), lacks_ranges);
  if (reuses == buffer.settings.reuses_memory && !lacks_any) return;
  const at::NoGradGuard no_grad_tracking;
  reset();
  const std::vector<at::Tensor> kept = buffer.copy_kept_gradients();
  buffer.settings.reuses_memory = reuses;
  planner.use(buffer.plans());
  if (!reuses) {
    buffer.put_back(kept);
    return;
  }
  for (size_t i = 0; i < params.size(); ++i) {
    if (kept[i].defined()) params[i].tensor.mutable_grad() = kept[i];
  }
}

void ReducerParts::set_static_graph() {
  errors.note([&] {
    if (queue.has_on_reduced()) {
      throw EnvironmentError("call _set_static_graph() before optimizer.step_in_backward(), not after.");
    }
    if (!has_begun) return;
    throw EnvironmentError(
        "_set_static_graph() should be called before training loop starts: pass static_graph=True to "
        "DistributedDataParallel instead.");
  });
  used.set_graph(Graph::kStaticUnknown);
}

void ReducerParts::set_mixed_precision(at::ScalarType dtype) {
  buffer.settings.low_precision = dtype;
  planner.start_over();
  queue.reset();
}

void ReducerParts::set_comm(std::shared_ptr<Comm> comm) {
  const at::NoGradGuard no_grad_tracking;
  std::vector<at::Tensor> kept(params.size());
  if (!connect) {
    reset();
  } else if (buffer.settings.on_moved) {
    kept = buffer.copy_kept_gradients();  // others stay where they are until they come again: the script may hold them
  }
  collectives.set_comm(std::move(comm));  // the first step of the new group is measured again
  buffer.free();
  planner.start_over();
  queue.reset();
  buffer.put_back(kept);
  connect = {};
}

// ---- The step as a whole.

void ReducerParts::reset() {
  claims.release();
  announced.is_under_way = false;
  kind = BackwardKind::kPrepared;
  gradients.reset();
  queue.reset();
  streams.reset();
  for (SideSum* sum : side_sums) sum->reset();
  uneven.reset();
  phase = StepPhase::kIdle;
  collectives.move_to(Progress::kIdle);
}

void ReducerParts::forget_step() {
  reset();
  weights.forget_weights();
  uneven.end_step();
  forwards = 0;
  end_callbacks.clear();
  queue.take_hand_over_error();
}

void ReducerParts::drain() const {
  queue.drain();
  for (const SideSum* sum : side_sums) ddp::drain(sum->pending());
}

void ReducerParts::wait_for_all() {
  RECORD_FUNCTION("drivetrain::wait_for_all_reduces", std::vector<c10::IValue>());
  queue.wait_for_rest();
  for (SideSum* sum : side_sums) sum->wait(queue.last_position());
}

void ReducerParts::end_interrupted_step() {
  if (!queue.have_all_started()) fail_incomplete();
  wait_for_all();
  collectives.count_step();  // as on ranks where backward did not raise
}

void ReducerParts::begin_gradient_check() {
  const bool are_used_early = optimizer_in_backward || queue.has_on_reduced() || buffer.settings.on_moved ||
                              buffer.settings.low_precision.has_value() || gradients.store().is_context();
  if (check.is_on() && are_used_early) {
    throw_unsupported(
        "check_gradients does not go together with step_in_backward(), main_grads(), mixed_precision or distributed "
        "autograd: they use or keep gradients before all ranks know what was found. Leave it out.");
  }
  check.begin_step(uneven.is_joining());
}

bool ReducerParts::must_drop_gradients() {
  const std::vector<GradientCheck::Finding> found = check.finish();
  if (found.empty()) return false;
  const std::string what = text(check.describe(found), ", in synchronized step ", collectives.steps());
  if (check.skips()) {
    check.note_skipped(what);
    return true;
  }
  drop_gradients();
  forget_step();
  used.end_step();
  throw EnvironmentError(what + ". No rank keeps gradients of this step.");
}

void ReducerParts::drop_gradients() {
  for (const Parameter& param : params) param.tensor.mutable_grad() = at::Tensor();
}

void ReducerParts::hand_back_gradients() {
  const bool is_done_elsewhere = optimizer_in_backward || buffer.settings.low_precision.has_value();
  for (size_t i = 0; i < params.size(); ++i) {
    const bool used_anywhere = used.find_used(i, queue.is_skipped(buffer.region(i).bucket));
    if (!is_done_elsewhere && !queue.was_handed_over(i)) gradients.hand_back(i, used_anywhere);
  }
}

void ReducerParts::reset_state() {
  drain();  // other ranks may be summing what lies in the buffer
  if (phase == StepPhase::kRunning && queue.have_all_started()) collectives.count_step();  // the others finish it
  forget_step();
  used.end_step();
}

void ReducerParts::check_finalized() {
  errors.note([&] {
    if (phase == StepPhase::kRunning) fail_incomplete();
  });
}

void ReducerParts::rebuild_buckets() {
  if (const auto call = connect) {  // set_comm() drops it
    if (const std::string why_not = call(); !why_not.empty()) {
      forget_step();
      throw EnvironmentError(why_not);
    }
  }
  if (planner.rebuild(used.may_change(), queue.has_hook())) queue.reset();
}

void ReducerParts::check_given_up() {
  const std::string why = collectives.progress()->why_given_up();
  if (why.empty()) return;
  forget_step();
  throw EnvironmentError(why);
}

void ReducerParts::check_unconsumed(size_t param, bool came) {
  const bool may_be_consumed =
      buffer.settings.low_precision.has_value() || optimizer_in_backward || gradients.store().is_context();
  if (may_be_consumed || collectives.comm().size() == 1) return;
  const Parameter& of = params[param];
  if (came && !of.tensor.grad().defined()) throw EnvironmentError(consumed_message(of, "lost its gradient"));
  if (of.tensor._version() == gradients[param].version) return;
  if (!collectives.can_compare()) throw EnvironmentError(consumed_message(of, "was changed"));
  gradients[param].is_changed = true;
}

void ReducerParts::fail_incomplete() const {
  ddp::fail_incomplete(params, {collectives.own_name(), gradients.missing(), used.graph() == Graph::kStaticKnown,
                                options.find_unused_parameters});
}

at::Tensor ReducerParts::free_region(size_t param) {
  const bool is_taken = gradients[param].ready || !queue.is_filling(buffer.region(param).bucket);
  if (params[param].sparse || is_taken || buffer.settings.low_precision.has_value() || buffer.settings.reuses_memory)
    return {};
  if (!buffer.has_intact_view(param)) return {};
  const at::NoGradGuard no_grad_tracking;
  buffer.leave_to_holders(param);
  return buffer.region(param).view;
}

Scaling ReducerParts::choose_scaling() const {
  const int64_t size = collectives.comm().size(), divisor = uneven.divisor();
  Scaling scaling;
  scaling.purpose = bucket_purpose();
  if (!weights.has_weight()) {
    if (divisor > 0 && divisor != size) {
      scaling.before = 1.0 / static_cast<double>(divisor);
    } else if (collectives.comm().averages()) {
      scaling.as_sum = false;
    } else {
      scaling.before = 1.0 / static_cast<double>(size);
    }
    // Transports always sum sparse gradients.
    scaling.before_sparse = 1.0 / static_cast<double>(divisor > 0 ? divisor : size);
  }
  if (queue.has_hook()) scaling.before = scaling.before_sparse = 1;  // a hook gets sums, and divides
  return scaling;
}

Purpose ReducerParts::bucket_purpose() const {
  // Ranks of weight 0 run no backward and match any, so that the sum of weights tells the kinds apart, not the tag.
  if (weights.has_weight()) return queue.has_hook() ? Purpose::kHook : Purpose::kWeightedBucket;
  const bool is_prepared = kind != BackwardKind::kUnprepared;
  if (queue.has_hook()) return is_prepared ? Purpose::kHook : Purpose::kUnpreparedHook;
  return is_prepared ? Purpose::kBucket : Purpose::kUnpreparedBucket;
}

void ReducerParts::promise_collectives() {
  std::vector<std::pair<Purpose, size_t>> purposes;
  const bool is_reduced = queue.has_hook() || collectives.comm().size() > 1;
  for (size_t i = 0; is_reduced && i < buffer.buckets().size(); ++i) {
    purposes.emplace_back(queue.scaling().purpose, i);
  }
  for (const SideSum* sum : side_sums) {
    if (sum->is_due()) purposes.emplace_back(sum->purpose(), 0);
  }
  collectives.promise(purposes);
}

void ReducerParts::mark_end() {
  const std::shared_ptr<Progress>& progress = collectives.progress();
  progress->end_step();
  const auto stream = stream_on(params[0].tensor.device());
  if (!stream) return;
  if (!device_end) device_end = std::make_shared<c10::Event>(stream->device_type());
  const auto has_ended = [end = device_end] {
    try {
      const OutsideCaptures outside_captures;  // the watchdog's thread asks, and the training's may capture
      return end->query();
    } catch (const c10::Error&) {
      // The step was captured into a CUDA graph, whose replays do not pass here. Or the device has failed, which the
      // training thread finds by itself.
      return true;
    }
  };
  progress->end_on_device([&] { device_end->record(*stream); }, has_ended);
}

void set_hook(ReducerParts& parts, std::unique_ptr<c10d::CommHookInterface> hook, std::vector<int64_t> first_caps) {
  if (parts.phase == StepPhase::kRunning) {
    throw EnvironmentError("register_comm_hook was called while a backward runs: call it between two steps.");
  }
  parts.queue.set_hook(std::move(hook));
  const at::NoGradGuard no_grad_tracking;
  parts.planner.follow_torch(std::move(first_caps), parts.used.graph() != Graph::kDynamic);
  parts.queue.reset();
}

}  // namespace drivetrain::ddp
