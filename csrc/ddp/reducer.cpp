// Implements the life of a synchronized step; see reducer.h.
#include "ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "base/check.h"
#include "base/grad_accumulator.h"
#include "grad/fuse_wgrad.h"

namespace drivetrain::ddp {
namespace {

using torch::autograd::Engine;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

}  // namespace

// ---- Hooks.

// Runs before a gradient is accumulated. A change of the parameter until Hook runs is the work of a hook. Earlier ones
// need not be, as a checkpointed forward runs again inside backward and may write parameters.
class Reducer::ArrivalHook : public torch::autograd::FunctionPreHook {
 public:
  ArrivalHook(std::weak_ptr<Reducer> reducer, size_t index) : reducer_(std::move(reducer)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (const auto reducer = reducer_.lock()) {
      reducer->with_parts([this](ReducerParts& parts) { parts.gradients.note_arrival(index_); });
    }
    return grads;
  }

 private:
  const std::weak_ptr<Reducer> reducer_;
  const size_t index_;
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
    return reducer->with_parts([this](ReducerParts& parts) { return parts.free_region(index_); });
  }

 private:
  const std::weak_ptr<Reducer> reducer_;  // weak: a graph may outlive the wrapper
  const size_t index_;
};

// Runs on a node that makes an output of the wrapper's forward. A backward through this node is that forward's.
class Reducer::OutputHook : public torch::autograd::FunctionPreHook {
 public:
  explicit OutputHook(std::weak_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (const auto reducer = reducer_.lock()) reducer->on_output();
    return grads;
  }

 private:
  const std::weak_ptr<Reducer> reducer_;
};

std::shared_ptr<Reducer> Reducer::make(std::vector<at::Tensor> params, std::vector<std::string> names,
                                       std::shared_ptr<Comm> comm, ReducerOptions options) {
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(params), std::move(names), std::move(comm), std::move(options)));
  for (Parameter& param : reducer->parts_.params) {
    param.accumulator = grad_accumulator_of(param.tensor);
    auto hook = std::make_unique<Hook>(reducer, reducer->hooks_.size());
    auto arrival = std::make_unique<ArrivalHook>(reducer, reducer->hooks_.size());
    reducer->arrival_hooks_.push_back(arrival.get());
    param.accumulator->add_pre_hook(std::move(arrival));
    reducer->hooks_.push_back(param.accumulator->add_post_hook(std::move(hook)));
  }
  return reducer;
}

Reducer::Reducer(std::vector<at::Tensor> params, std::vector<std::string> names, std::shared_ptr<Comm> comm,
                 ReducerOptions options)
    : parts_(std::move(params), std::move(names), std::move(comm), std::move(options)) {}

Reducer::~Reducer() { remove_hooks(); }

void Reducer::remove_hooks() {
  for (size_t i = 0; i < hooks_.size(); ++i) {
    torch::autograd::Node& accumulator = *parts_.params[i].accumulator;
    accumulator.del_post_hook(hooks_[i]);
    auto& before = accumulator.pre_hooks();
    const auto is_ours = [&](const auto& hook) { return hook.get() == arrival_hooks_[i]; };
    before.erase(std::remove_if(before.begin(), before.end(), is_ours), before.end());
  }
  hooks_.clear();
}

void Reducer::remove_autograd_hooks() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  remove_hooks();
  for (Parameter& param : parts_.params) param.accumulator.reset();
  parts_.reset();
}

// ---- 1. The forward.

void Reducer::prepare_for_forward() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  parts_.errors.note([&] { parts_.check_given_up(); });
  parts_.now = StepTimes{clock_ns()};
  parts_.collectives.move_to(Progress::kForward);
}

std::vector<std::string> Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<std::string> unfrozen;
  parts_.errors.note([&] {
    if (parts_.phase == StepPhase::kRunning) parts_.end_interrupted_step();
    parts_.weights.check_late();
    if (!parts_.buffer.settings.low_precision.has_value()) {
      for (const Parameter& param : parts_.params) check_hooked(param);
    }
    unfrozen = take_unfrozen(parts_.frozen);
    parts_.reset();
    parts_.has_begun = true;
    ++parts_.forwards;
    // After several forwards the order of their backwards is unknown. Unused parameters are then found at the end.
    if (parts_.used.may_change() && parts_.forwards == 1) parts_.used.search(outputs);
    parts_.phase = StepPhase::kPrepared;
    parts_.collectives.move_to(Progress::kBackward);
  });
  return unfrozen;
}

void Reducer::announce(const std::vector<at::Tensor>& outputs) {
  torch::autograd::Node* last = nullptr;
  for (const at::Tensor& output : outputs) {
    torch::autograd::Node* const node = output.grad_fn().get();
    if (node == nullptr || node == last) continue;
    node->add_pre_hook(std::make_unique<OutputHook>(weak_from_this()));
    last = node;
  }
}

// ---- 2. Gradients come.

void Reducer::on_gradient(size_t index, bool came, const at::Tensor& grad) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  parts_.gradients.note_accumulation(index, grad);
  const at::NoGradGuard no_grad_tracking;
  parts_.errors.note([&] { take_gradient(index, came); });
}

void Reducer::take_gradient(size_t index, bool came) {
  const Parameter& param = parts_.params[index];
  parts_.weights.check_gradient(index);
  auto rpc_context = ThreadLocalDistAutogradContext::getContextPtr();
  const bool has_grad = rpc_context ? came : param.tensor.grad().defined();
  if (has_grad) parts_.used.note_used(index);
  if (parts_.phase == StepPhase::kIdle) {
    AnnouncedBackward& announced = parts_.announced;
    if (announced.is_under_way) {
      announced.has_gradient = true;
      if (torch::autograd::get_current_graph_task_id() == announced.task) parts_.check_unconsumed(index, came);
    }
    const bool moves = has_grad && !param.sparse && !rpc_context && !parts_.buffer.settings.reuses_memory;
    if (moves) parts_.gradients.take(index, 1);
    return;
  }
  if (rpc_context && parts_.buffer.settings.reuses_memory) {
    throw_unsupported(
        "optimizer.step_in_backward() does not go together with distributed autograd (torch.distributed.autograd), "
        "which keeps gradients to itself: step after backward.");
  }
  parts_.gradients.store().use(std::move(rpc_context));
  if (parts_.phase == StepPhase::kPrepared) begin_backward();
  parts_.streams.note(param.tensor.device());
  parts_.check_unconsumed(index, came);
  parts_.planner.note_order(index);
  if (!parts_.used.count_hook(index)) return;
  parts_.gradients[index].without_grad = !has_grad;
  mark_ready(index);
  parts_.planner.note_time(index, parts_.now);
  start_full_buckets_in_backward();
}

void Reducer::begin_backward() {
  parts_.check_given_up();
  parts_.has_begun = true;
  parts_.collectives.move_to(Progress::kGradients);
  parts_.rebuild_buckets();
  for (const auto& [device, memory] : parts_.buffer.memory()) parts_.streams.note(memory.device());
  parts_.phase = StepPhase::kRunning;
  parts_.planner.begin_step();
  parts_.now.buckets_reduced = 0;
  parts_.now.exposed = 0;
  parts_.now.backward_start = clock_ns();
  // After several forwards the first of several backwards may leave out what the others use. The unused parameters of a
  // static graph are known.
  const bool may_differ = parts_.used.graph() != Graph::kStaticKnown;
  if (parts_.forwards > 1 && parts_.options.find_unused_parameters && may_differ) mark_rest_unused_at_end();
  parts_.weights.begin_step(parts_.kind);
  parts_.queue.scaling() = parts_.choose_scaling();
  parts_.replicas.begin_step(parts_.uneven.is_joining());
  parts_.begin_gradient_check();
  parts_.promise_collectives();
  for (size_t index : parts_.used.take_unused()) {
    parts_.gradients[index].without_grad = true;
    mark_ready(index);
  }
}

void Reducer::mark_ready(size_t index) {
  const Parameter& param = parts_.params[index];
  ParamStep& step = parts_.gradients[index];
  if (step.ready) fail_second_gradient(param);
  step.ready = true;
  step.delegated = !parts_.claims.claim(param);
  parts_.queue.add(index);
}

void Reducer::mark_rest_unused() {
  for (size_t i = 0; i < parts_.params.size(); ++i) {
    ParamStep& step = parts_.gradients[i];
    if (step.ready) continue;
    const bool has_grad = parts_.gradients.store().is_context() || parts_.params[i].tensor.grad().defined();
    step.without_grad = step.fired == 0 || !has_grad;
    mark_ready(i);
  }
  start_full_buckets_in_backward();
}

void Reducer::mark_rest_unused_at_end() {
  Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    const std::lock_guard<std::recursive_mutex> lock(self->mutex_);
    if (self->parts_.used.graph() == Graph::kStaticUnknown) {
      self->delay_all_reduce();
      return;
    }
    const at::NoGradGuard no_grad_tracking;
    if (self->parts_.phase != StepPhase::kRunning || self->parts_.queue.have_all_started()) return;
    self->parts_.errors.note([&] { self->mark_rest_unused(); });
  });
}

void Reducer::delay_all_reduce() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  const bool synchronizes = parts_.phase != StepPhase::kIdle;
  if (parts_.used.graph() != Graph::kStaticUnknown || !synchronizes) return;
  if (parts_.phase == StepPhase::kPrepared) begin_backward();
  parts_.used.expect_as_counted();
  parts_.errors.note([&] { mark_rest_unused(); });
}

// ---- 3. Buckets start.

// Returns true if this call started the last bucket, and with it what the step sums besides the buckets.
bool Reducer::start_full_buckets() {
  if (!parts_.queue.start_full()) return false;
  parts_.now.backward_end = clock_ns();
  for (SideSum* sum : parts_.side_sums) sum->start();
  return true;
}

void Reducer::start_full_buckets_in_backward() {
  const bool have_all_started = start_full_buckets();
  parts_.queue.hand_over_reduced();
  if (!have_all_started) return;
  Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    const std::lock_guard<std::recursive_mutex> lock(self->mutex_);
    const at::NoGradGuard no_grad_tracking;
    self->parts_.errors.note([&] { self->finalize(); });
  });
}

// ---- 4. The step ends.

void Reducer::finalize() {
  for (const auto& [device, memory] : parts_.buffer.memory()) parts_.streams.join(memory.device());
  {
    const Stopwatch stopwatch(parts_.now.exposed);
    parts_.wait_for_all();
  }
  parts_.collectives.count_step();  // also if an error follows: ranks must agree on the number
  parts_.now.comm_end = clock_ns();
  parts_.last = parts_.now;
  parts_.planner.note_exposed(parts_.now.exposed);
  try {
    parts_.queue.take_hook_results();
  } catch (...) {
    parts_.forget_step();
    throw;
  }
  const bool drops_gradients = parts_.must_drop_gradients();
  // A hook has divided by the number of ranks already.
  parts_.weights.divide(parts_.buffer, parts_.queue.has_hook() ? parts_.collectives.comm().size() : 1);
  parts_.used.finish();
  parts_.hand_back_gradients();
  if (parts_.used.graph() == Graph::kStaticUnknown) parts_.used.set_graph(Graph::kStaticKnown);
  parts_.queue.hand_over_rest();
  if (drops_gradients) parts_.drop_gradients();
  parts_.used.end_step();
  parts_.weights.forget_weights();
  if (parts_.uneven.is_joining()) parts_.planner.miss_times();
  parts_.uneven.end_step();
  parts_.forwards = 0;
  parts_.mark_end();
  const bool compares = parts_.replicas.pending() != nullptr;
  const std::exception_ptr error = parts_.queue.take_hand_over_error();
  const std::vector<std::function<void()>> callbacks = std::exchange(parts_.end_callbacks, {});
  parts_.reset();
  for (const auto& callback : callbacks) callback();
  if (error) std::rethrow_exception(error);
  if (compares) parts_.replicas.compare(parts_.queue.last_position());
}

// ---- Backwards that no forward has prepared.

// This backward is one of the wrapper's: a second one over the same outputs, or one whose forward ran under no_sync().
// Hooks only collect until its end, so that reentrant checkpoints may bring several gradients of one parameter.
void Reducer::on_output() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (parts_.phase != StepPhase::kIdle || !sync_ || parts_.buffer.settings.low_precision.has_value()) return;
  if (ThreadLocalDistAutogradContext::getContextPtr()) return;
  const int task = torch::autograd::get_current_graph_task_id();
  if (parts_.announced.is_under_way && parts_.announced.task == task) return;
  parts_.announced = {.is_under_way = true, .task = task};
  Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
    if (const auto self = weak.lock()) self->reduce_announced(task);
  });
}

void Reducer::reduce_announced(int task) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!parts_.announced.is_under_way || parts_.announced.task != task) return;
  parts_.announced.is_under_way = false;
  // torch.autograd.grad() and backward(inputs=...) leave .grad alone.
  if (!parts_.announced.has_gradient || parts_.phase != StepPhase::kIdle) return;
  const at::NoGradGuard no_grad_tracking;
  parts_.errors.note([&] {
    parts_.reset();
    if (parts_.used.graph() == Graph::kDynamic && !parts_.options.find_unused_parameters) {
      for (size_t i = 0; i < parts_.params.size(); ++i) {
        parts_.gradients[i].ready = parts_.params[i].tensor.grad().defined();
      }
      if (!parts_.gradients.missing().empty()) parts_.fail_incomplete();
    }
    reduce_gradients(BackwardKind::kUnprepared);
  });
}

// Reduces the gradients in `.grad` as a step of its own.
void Reducer::reduce_gradients(BackwardKind kind) {
  if (parts_.put_aside) parts_.put_aside();
  parts_.planner.miss_times();
  parts_.reset();
  parts_.kind = kind;
  begin_backward();
  for (size_t i = 0; i < parts_.params.size(); ++i) {
    if (parts_.gradients[i].ready) continue;
    parts_.gradients[i].without_grad = !parts_.params[i].tensor.grad().defined();
    mark_ready(i);
  }
  start_full_buckets();
  const Graph graph = parts_.used.graph();
  finalize();
  parts_.used.set_graph(graph);  // this step has not counted a static graph's hooks
}

// ---- Weighted backwards.

void Reducer::begin_weighted(double weight, const WeightedMean::Holds& holds) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const bool is_used_early = parts_.queue.has_on_reduced() && !parts_.put_aside;
  if (parts_.optimizer_in_backward || is_used_early || parts_.buffer.settings.low_precision.has_value()) {
    throw UnsupportedError(
        "backward(loss, weight=...) does not go together with optimizers that run inside backward, nor with DDP's "
        "mixed_precision. Both use gradients before the sum of weights is known.");
  }
  const at::NoGradGuard no_grad_tracking;
  parts_.weights.begin(weight, holds);
}

void Reducer::end_weighted(bool failed) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  parts_.weights.end(failed);
  // Other ranks take part, even if the loss did not come out of this wrapper's forward.
  const bool is_unreduced = parts_.phase == StepPhase::kIdle && parts_.weights.is_in_step_of_begin();
  if (!failed && sync_ && is_unreduced) reduce_collected();
  parts_.weights.note_gradients();
}

void Reducer::reduce_collected() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  parts_.errors.note([&] {
    if (parts_.phase == StepPhase::kRunning) parts_.end_interrupted_step();
    parts_.weights.count_nothing();
    reduce_gradients(BackwardKind::kAny);
  });
}

}  // namespace drivetrain::ddp
