// Implements the life of a synchronized step; see reducer.h.
#include "ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/grad_accumulator.h"
#include "ddp/tensors.h"
#include "grad/fuse_wgrad.h"

namespace drivetrain::ddp {
namespace {

using torch::autograd::Engine;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

}  // namespace

// ---- Hooks.

// Calls a function with the reducer, under its mutex, before a node of the graph runs.
class Reducer::PreHook : public torch::autograd::FunctionPreHook {
 public:
  PreHook(std::weak_ptr<Reducer> reducer, std::function<void(Reducer&)> call)
      : reducer_(std::move(reducer)), call_(std::move(call)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (const auto reducer = reducer_.lock()) {
      const Lock lock(reducer->mutex_);
      call_(*reducer);
    }
    return grads;
  }

 private:
  const std::weak_ptr<Reducer> reducer_;  // weak: a graph may outlive the wrapper
  const std::function<void(Reducer&)> call_;
};

// Runs after a gradient has been accumulated. It implements nothing for compiled autograd, which therefore refuses it
// with an error instead of leaving it out.
class Reducer::Hook : public torch::autograd::FunctionPostHook, public grad::HasGradientView {
 public:
  Hook(std::weak_ptr<Reducer> reducer, size_t index) : reducer_(std::move(reducer)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    if (const auto reducer = reducer_.lock()) {
      const at::Tensor grad = inputs.empty() ? at::Tensor() : inputs[0];
      reducer->on_gradient(index_, inputs.empty() || grad.defined(), grad);
    }
    return outputs;
  }

  at::Tensor gradient_view() override {
    const auto reducer = reducer_.lock();
    if (!reducer) return {};
    const Lock lock(reducer->mutex_);
    return reducer->free_region(index_);
  }

 private:
  const std::weak_ptr<Reducer> reducer_;
  const size_t index_;
};

std::shared_ptr<Reducer> Reducer::make(std::vector<at::Tensor> params, std::vector<std::string> names,
                                       std::shared_ptr<Comm> comm, ReducerOptions options) {
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(params), std::move(names), std::move(comm), std::move(options)));
  for (size_t i = 0; i < reducer->params_.size(); ++i) {
    Parameter& param = reducer->params_[i];
    param.accumulator = grad_accumulator_of(param.tensor);
    // Runs before a gradient is accumulated. A change of the parameter until Hook runs is the work of a hook. Earlier
    // ones need not be, as a checkpointed forward runs again inside backward and may write parameters.
    auto arrival = std::make_unique<PreHook>(reducer, [i](Reducer& of) { of.gradients_.note_arrival(i); });
    reducer->arrival_hooks_.push_back(arrival.get());
    param.accumulator->add_pre_hook(std::move(arrival));
    reducer->hooks_.push_back(param.accumulator->add_post_hook(std::make_unique<Hook>(reducer, i)));
  }
  return reducer;
}

Reducer::~Reducer() { remove_hooks(); }

// Calls the body under the mutex once the current backward has ended, if the reducer exists then.
void Reducer::at_end_of_backward(std::function<void()> body) {
  Engine::get_default_engine().queue_callback([weak = weak_from_this(), body = std::move(body)] {
    if (const auto self = weak.lock()) {
      const Lock lock(self->mutex_);
      const at::NoGradGuard no_grad_tracking;
      body();
    }
  });
}

void Reducer::remove_hooks() {
  for (size_t i = 0; i < hooks_.size(); ++i) {
    torch::autograd::Node& accumulator = *params_[i].accumulator;
    accumulator.del_post_hook(hooks_[i]);
    auto& before = accumulator.pre_hooks();
    const auto is_ours = [&](const auto& hook) { return hook.get() == arrival_hooks_[i]; };
    before.erase(std::remove_if(before.begin(), before.end(), is_ours), before.end());
  }
  hooks_.clear();
}

void Reducer::set_mixed_precision(at::ScalarType dtype) {
  const Lock lock(mutex_);
  remove_autograd_hooks();
  buffer_.settings.low_precision = dtype;
  planner_.start_over();
  queue_.reset();
}

void Reducer::remove_autograd_hooks() {
  const Lock lock(mutex_);
  remove_hooks();
  for (Parameter& param : params_) param.accumulator.reset();
  reset();
}

// ---- 1. The forward.

void Reducer::prepare_for_forward() {
  const Lock lock(mutex_);
  errors_.note([&] { check_given_up(); });
  now_ = StepTimes{clock_ns()};
  collectives_.move_to(Progress::kForward);
}

std::vector<std::string> Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const Lock lock(mutex_);
  std::vector<std::string> unfrozen;
  errors_.note([&] {
    if (phase_ == StepPhase::kRunning) end_interrupted_step();
    weights_.check_late();
    if (!buffer_.settings.low_precision.has_value()) {
      for (const Parameter& param : params_) check_hooked(param);
    }
    unfrozen = take_unfrozen(options_.frozen);
    reset();
    has_begun_ = true;
    ++forwards_;
    // After several forwards the order of their backwards is unknown. Unused parameters are then found at the end.
    if (used_.may_change() && forwards_ == 1) used_.search(outputs);
    phase_ = StepPhase::kPrepared;
    collectives_.move_to(Progress::kBackward);
  });
  return unfrozen;
}

void Reducer::announce(const std::vector<at::Tensor>& outputs) {
  torch::autograd::Node* last = nullptr;
  for (const at::Tensor& output : outputs) {
    torch::autograd::Node* const node = output.grad_fn().get();
    if (node == nullptr || node == last) continue;
    // A backward through this node is that forward's.
    node->add_pre_hook(std::make_unique<PreHook>(weak_from_this(), [](Reducer& of) { of.on_output(); }));
    last = node;
  }
}

// ---- 2. Gradients come.

void Reducer::on_gradient(size_t index, bool came, const at::Tensor& grad) {
  const Lock lock(mutex_);
  gradients_.note_accumulation(index, grad);
  const at::NoGradGuard no_grad_tracking;
  errors_.note([&] { take_gradient(index, came); });
}

void Reducer::take_gradient(size_t index, bool came) {
  const Parameter& param = params_[index];
  weights_.check_gradient(index);
  auto rpc_context = ThreadLocalDistAutogradContext::getContextPtr();
  const bool has_grad = rpc_context ? came : param.tensor.grad().defined();
  if (has_grad) used_.note_used(index);
  if (phase_ == StepPhase::kIdle) {
    AnnouncedBackward& announced = announced_;
    if (announced.is_under_way) {
      announced.has_gradient = true;
      if (torch::autograd::get_current_graph_task_id() == announced.task) check_unconsumed(index, came);
    }
    const bool stays = param.sparse || rpc_context || buffer_.settings.reuses_memory || part_sums_.is_before_last();
    if (has_grad && !stays) gradients_.take(index, 1);
    return;
  }
  if (rpc_context && buffer_.settings.reuses_memory) {
    throw_unsupported(
        "optimizer.step_in_backward() does not go together with distributed autograd (torch.distributed.autograd), "
        "which keeps gradients to itself: step after backward.");
  }
  gradients_.store().use(std::move(rpc_context));
  if (phase_ == StepPhase::kPrepared) begin_backward();
  streams_.note(param.tensor.device());
  check_unconsumed(index, came);
  planner_.note_order(index);
  if (!used_.count_hook(index)) return;
  gradients_[index].without_grad = !has_grad;
  mark_ready(index);
  planner_.note_time(index, now_);
  start_full_buckets_in_backward();
}

void Reducer::begin_backward() {
  check_given_up();
  if (options_.logical_ranks > 0 && !weights_.has_weight()) {
    forget_step();
    fail_outside_window();
  }
  has_begun_ = true;
  collectives_.move_to(Progress::kGradients);
  rebuild_buckets();
  for (const auto& [device, memory] : buffer_.memory()) streams_.note(memory.device());
  phase_ = StepPhase::kRunning;
  planner_.begin_step();
  now_.buckets_reduced = 0;
  now_.exposed = 0;
  now_.backward_start = clock_ns();
  // After several forwards the first of several backwards may leave out what the others use. The unused parameters of a
  // static graph are known.
  const bool may_differ = used_.graph() != Graph::kStaticKnown;
  if (forwards_ > 1 && options_.find_unused_parameters && may_differ) mark_rest_unused_at_end();
  queue_.scaling() = choose_scaling();
  begin_side_sums();
  promise_collectives();
  for (size_t index : used_.take_unused()) {
    gradients_[index].without_grad = true;
    mark_ready(index);
  }
}

void Reducer::mark_ready(size_t index) {
  const Parameter& param = params_[index];
  ParamStep& step = gradients_[index];
  if (step.ready) fail_second_gradient(param);
  step.ready = true;
  step.delegated = !claims_.claim(param);
  queue_.add(index);
}

void Reducer::mark_rest_unused() {
  for (size_t i = 0; i < params_.size(); ++i) {
    ParamStep& step = gradients_[i];
    if (step.ready) continue;
    const bool has_grad = gradients_.store().is_context() || params_[i].tensor.grad().defined();
    step.without_grad = step.fired == 0 || !has_grad;
    mark_ready(i);
  }
  start_full_buckets_in_backward();
}

void Reducer::mark_rest_unused_at_end() {
  at_end_of_backward([this] {
    if (used_.graph() == Graph::kStaticUnknown) {
      delay_all_reduce();
    } else if (phase_ == StepPhase::kRunning && !queue_.have_all_started()) {
      errors_.note([&] { mark_rest_unused(); });
    }
  });
}

void Reducer::delay_all_reduce() {
  const Lock lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  const bool synchronizes = phase_ != StepPhase::kIdle;
  if (used_.graph() != Graph::kStaticUnknown || !synchronizes) return;
  if (phase_ == StepPhase::kPrepared) begin_backward();
  used_.expect_as_counted();
  errors_.note([&] { mark_rest_unused(); });
}

// ---- 3. Buckets start.

// Returns true if this call started the last bucket, and with it what the step sums besides the buckets.
bool Reducer::start_full_buckets() {
  if (!queue_.start_full()) return false;
  now_.backward_end = clock_ns();
  for (SideSum* sum : side_sums_) sum->start();
  return true;
}

void Reducer::start_full_buckets_in_backward() {
  const bool have_all_started = start_full_buckets();
  queue_.hand_over_reduced();
  if (!have_all_started) return;
  at_end_of_backward([this] { errors_.note([&] { finalize(); }); });
}

// ---- 4. The step ends.

void Reducer::finalize() {
  for (const auto& [device, memory] : buffer_.memory()) streams_.join(memory.device());
  {
    const Stopwatch stopwatch(now_.exposed);
    wait_for_all();
  }
  collectives_.count_step();  // also if an error follows: ranks must agree on the number
  now_.comm_end = clock_ns();
  last_ = now_;
  planner_.note_exposed(now_.exposed);
  try {
    queue_.take_hook_results();
  } catch (...) {
    forget_step();
    throw;
  }
  const bool drops_gradients = must_drop_gradients();
  // A hook has divided by the number of ranks already.
  weights_.divide(queue_, buffer_, queue_.has_hook() ? collectives_.comm().size() : 1);
  used_.finish();
  noise_.finish();
  hand_back_gradients();
  if (used_.graph() == Graph::kStaticUnknown) used_.set_graph(Graph::kStaticKnown);
  queue_.hand_over_rest();
  if (drops_gradients) drop_gradients();
  for (SideSum* sum : side_sums_) sum->end_step();
  part_sums_.clear();
  if (uneven_.is_joining) planner_.miss_times();
  uneven_ = {};
  forwards_ = 0;
  mark_end();
  const bool compares = replicas_.pending() != nullptr;
  const std::exception_ptr error = queue_.take_hand_over_error();
  const std::vector<std::function<void()>> callbacks = std::exchange(end_callbacks_, {});
  reset();
  for (const auto& callback : callbacks) callback();
  if (error) std::rethrow_exception(error);
  if (compares) replicas_.compare(queue_.last_position());
}

// ---- Backwards that no forward has prepared.

// This backward is one of the wrapper's: a second one over the same outputs, or one whose forward ran under no_sync().
// Hooks only collect until its end, so that reentrant checkpoints may bring several gradients of one parameter.
void Reducer::on_output() {
  if (phase_ != StepPhase::kIdle || !sync_ || buffer_.settings.low_precision.has_value()) return;
  if (ThreadLocalDistAutogradContext::getContextPtr()) return;
  const int task = torch::autograd::get_current_graph_task_id();
  if (announced_.is_under_way && announced_.task == task) return;
  announced_ = {.is_under_way = true, .task = task};
  at_end_of_backward([this, task] { reduce_announced(task); });
}

void Reducer::reduce_announced(int task) {
  if (!announced_.is_under_way || announced_.task != task) return;
  announced_.is_under_way = false;
  // torch.autograd.grad() and backward(inputs=...) leave .grad alone.
  if (!announced_.has_gradient || phase_ != StepPhase::kIdle) return;
  errors_.note([&] {
    reset();
    if (used_.graph() == Graph::kDynamic && !options_.find_unused_parameters) {
      for (size_t i = 0; i < params_.size(); ++i) {
        gradients_[i].ready = params_[i].tensor.grad().defined();
      }
      if (!gradients_.missing().empty()) fail_incomplete();
    }
    reduce_gradients(BackwardKind::kUnprepared);
  });
}

// Reduces the gradients in `.grad` as a step of its own.
void Reducer::reduce_gradients(BackwardKind kind) {
  if (put_aside_) put_aside_();
  planner_.miss_times();
  reset();
  kind_ = kind;
  begin_backward();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (gradients_[i].ready) continue;
    gradients_[i].without_grad = !params_[i].tensor.grad().defined();
    mark_ready(i);
  }
  start_full_buckets();
  const Graph graph = used_.graph();
  finalize();
  used_.set_graph(graph);  // this step has not counted a static graph's hooks
}

// ---- Weighted backwards.

void Reducer::begin_weighted(double weight, const WeightedMean::Holds& holds) {
  const Lock lock(mutex_);
  const bool is_used_early = queue_.has_on_reduced() && !put_aside_;
  if (optimizer_in_backward_ || is_used_early || buffer_.settings.low_precision.has_value()) {
    throw UnsupportedError(
        "backward(loss, weight=...) does not go together with optimizers that run inside backward, nor with DDP's "
        "mixed_precision. Both use gradients before the sum of weights is known.");
  }
  const at::NoGradGuard no_grad_tracking;
  weights_.begin(weight, holds);
}

void Reducer::end_weighted(bool failed) {
  const Lock lock(mutex_);
  weights_.end(failed);
  // Other ranks take part, even if the loss did not come out of this wrapper's forward.
  const bool is_unreduced = phase_ == StepPhase::kIdle && weights_.is_in_step_of_begin();
  if (!failed && sync_ && is_unreduced) reduce_collected();
  weights_.note_gradients();
}

void Reducer::reduce_collected() {
  const Lock lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  errors_.note([&] {
    if (phase_ == StepPhase::kRunning) end_interrupted_step();
    weights_.count_nothing();
    reduce_gradients(BackwardKind::kAny);
  });
}

void Reducer::end_part(bool is_first) {
  const Lock lock(mutex_);
  if (is_first) part_sums_.clear();
  const at::NoGradGuard no_grad_tracking;
  streams_.wait_for_accumulators();
  if (put_aside_) put_aside_();  // zeros that a step has left
  part_sums_.end_part(weights_.take());
  streams_.let_accumulators_wait();
  weights_.note_gradients();
}

// ---- Interrupted steps.

void Reducer::reset_state() {
  const Lock lock(mutex_);
  drain();  // other ranks may be summing what lies in the buffer
  if (phase_ == StepPhase::kRunning && queue_.have_all_started()) collectives_.count_step();  // the others finish it
  forget_step();
}

void Reducer::check_finalized() {
  const Lock lock(mutex_);
  errors_.note([&] {
    if (phase_ == StepPhase::kRunning) fail_incomplete();
  });
}

bool Reducer::settle_between_backwards() {
  const std::unique_lock lock(mutex_, std::chrono::milliseconds(5));  // a backward of another thread waits for long
  const bool is_in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!lock || phase_ != StepPhase::kRunning || is_in_backward || queue_.have_all_started()) return false;
  drain();
  return true;
}

}  // namespace drivetrain::ddp
