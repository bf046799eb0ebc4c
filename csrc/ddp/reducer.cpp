// The reducer's hooks and phases; see reducer.h for the life of a step.
#include "ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <algorithm>
#include <exception>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/grad_accumulator.h"
#include "base/heap.h"
#include "base/stream_order.h"
#include "base/transfer.h"
#include "ddp/replicas.h"
#include "ddp/tensors.h"
#include "grad/fuse_wgrad.h"

namespace drivetrain::ddp {
namespace {

using torch::autograd::Node;

constexpr size_t kExposedKept = 64;

// What is waited for beside buckets.
const auto kUsedMap = std::make_shared<const std::string>("the map of used parameters");
const auto kWeights = std::make_shared<const std::string>("the weights");
const auto kReplicas = std::make_shared<const std::string>("the replicas' checksums");

// Every gradient accumulator that backward from these tensors can reach.
std::unordered_set<Node*> reachable_nodes(const std::vector<at::Tensor>& outputs) {
  std::unordered_set<Node*> seen;
  std::vector<Node*> queue;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) queue.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!queue.empty()) {
    Node* node = queue.back();
    queue.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return seen;
}

}  // namespace

// Without what compiled autograd asks of hooks: that refuses it with an error instead of leaving it out.
class Reducer::Hook : public torch::autograd::FunctionPostHook, public grad::KnowsPlace {
 public:
  Hook(std::weak_ptr<Reducer> reducer, size_t index) : reducer_(std::move(reducer)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    if (const auto reducer = reducer_.lock()) reducer->on_gradient(index_, inputs.empty() || inputs[0].defined());
    return outputs;
  }

  at::Tensor place() override {
    const auto reducer = reducer_.lock();
    return reducer ? reducer->free_place(index_) : at::Tensor();
  }

 private:
  const std::weak_ptr<Reducer> reducer_;  // weak: a graph may outlive the wrapper
  const size_t index_;
};

// On a node that makes an output of the wrapper's forward: a backward that comes by is that forward's.
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
                                       std::shared_ptr<Comm> comm, const Options& options) {
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(params), std::move(names), std::move(comm), options));
  reducer->add_hooks();
  return reducer;
}

Reducer::Reducer(std::vector<at::Tensor> params, std::vector<std::string> names, std::shared_ptr<Comm> comm,
                 const Options& options)
    : comm_(std::move(comm)), options_(options) {
  DT_INVARIANT(!params.empty() && params.size() == names.size() && params.size() == options.sparse.size());
  for (size_t i = 0; i < params.size(); ++i) {
    Parameter& param = params_.emplace_back();
    param.tensor = std::move(params[i]);
    param.name = std::move(names[i]);
    param.sparse = options.sparse[i];
    param.grad_dtype = param.tensor.grad_dtype().value_or(param.tensor.scalar_type());
  }
  local_used_ = at::zeros({static_cast<int64_t>(params_.size())}, at::kInt);
  int64_t largest = 0;
  for (const Parameter& param : params_) {
    if (param.tensor.is_cpu() && !param.sparse) largest = std::max<int64_t>(largest, param.tensor.nbytes());
  }
  keep_freed_memory(largest);  // a backward frees each gradient once it is in the arena
  build_arena(plan(registration_order()));
  if (options_.shares_norm) norm_ = grad::ReducedNorm::make();
  ++num_reducers_;
}

void Reducer::add_hooks() {
  for (size_t i = 0; i < params_.size(); ++i) {
    Parameter& param = params_[i];
    param.accumulator = grad_accumulator_of(param.tensor);
    param.hook = param.accumulator->add_post_hook(std::make_unique<Hook>(weak_from_this(), i));
  }
}

Reducer::~Reducer() {
  release_params();
  --num_reducers_;
  for (Parameter& param : params_) {
    if (param.accumulator) param.accumulator->del_post_hook(param.hook);
  }
}

void Reducer::remove_autograd_hooks() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (Parameter& param : params_) {
    if (param.accumulator) param.accumulator->del_post_hook(param.hook);
    param.accumulator.reset();
  }
  reset();
}

// ---- Settings.

// Changes with every write to .grad that autograd would notice, and with every other tensor there.
std::pair<const void*, uint32_t> Reducer::seen_grad(const Parameter& param) const {
  const at::Tensor& grad = param.tensor.grad();
  if (!grad.defined()) return {nullptr, 0};
  return {grad.unsafeGetTensorImpl(), grad._version()};
}

void Reducer::set_joining(int64_t divisor) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  is_joining_ = true;
  divisor_ = divisor;
}

void Reducer::set_static_graph() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  noting_errors([&] {
    if (on_reduced_) {
      throw EnvironmentError("call _set_static_graph() before optimizer.step_in_backward(), not after.");
    }
    if (!began_) return;
    throw EnvironmentError(
        "_set_static_graph() should be called before training loop starts: pass static_graph=True to "
        "DistributedDataParallel instead.");
  });
  graph_ = Graph::kStaticUnknown;
}

bool Reducer::is_graph_known() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return graph_ == Graph::kStaticKnown;
}

void Reducer::set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (comm_hook_) {
    throw EnvironmentError(
        "register_comm_hook or register_builtin_comm_hook can only be called once: this DistributedDataParallel has a "
        "communication hook already.");
  }
  comm_hook_ = std::move(hook);
}

void Reducer::set_optimizer_in_backward() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  optimizer_in_backward_ = true;
}

void Reducer::set_on_reduced(std::function<void(const std::vector<size_t>&, bool)> on_reduced) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  on_reduced_ = std::move(on_reduced);
  const bool reuses = can_hand_over_early() && graph_ == Graph::kDynamic && !on_moved_;
  if (reuses == reuses_memory_) return;
  const at::NoGradGuard no_grad_tracking;
  reset();
  const std::vector<at::Tensor> kept = copy_kept_gradients();
  reuses_memory_ = reuses;
  build_arena(std::vector<BucketPlan>(plans_));  // a copy: it assigns them
  if (!reuses) {
    put_back(kept);
    return;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    if (kept[i].defined()) params_[i].tensor.mutable_grad() = kept[i];
  }
}

void Reducer::set_mixed_precision(at::ScalarType dtype) {
  remove_autograd_hooks();
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  low_precision_ = dtype;
  build_arena(plan(registration_order()));
}

void Reducer::set_comm(std::shared_ptr<Comm> comm) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  steps_ = 0;  // rebuilds after the first of the new group
  reset();
  comm_ = std::move(comm);
  for (const auto& [device, arena] : arenas_) keep_for_streams(arena);
  arenas_.clear();
  is_rebuilt_ = is_measuring_ = misses_times_ = false;
  fired_.clear();
  build_arena(plan(registration_order()));
  if (on_moved_) on_moved_(gradient_places());
}

void Reducer::reset_state() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  drain();  // other ranks may be adding up what lies in the arena
  if (step_ == Step::kRunning && next_bucket_ == buckets_.size()) ++steps_;  // for them it ends
  forget_step();
  local_used_.zero_();
}

void Reducer::add_end_callback(std::function<void()> callback) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  end_callbacks_.push_back(std::move(callback));
}

// ---- A step's beginning.

void Reducer::reset() {
  release_params();
  is_collecting_ = false;
  for (Parameter& param : params_) {
    param.ready = param.without_grad = param.delegated = false;
    param.untouched = param.differentiable = at::Tensor();
    param.fired = 0;
  }
  for (Bucket& bucket : buckets_) {
    bucket.missing = bucket.params.size();
    bucket.phase = Phase::kFilling;
    bucket.hooked = nullptr;
    bucket.kept = at::Tensor();
    bucket.reduce.reset();
    if (bucket.sparse) bucket.flat = at::Tensor();
  }
  next_bucket_ = next_to_hand_over_ = 0;
  streams_.clear();
  unused_.clear();
  used_reduce_.reset();
  weight_reduce_.reset();
  replica_reduce_.reset();
  rpc_context_.reset();
  step_ = Step::kIdle;
  progress_->move_to(steps_ + 1, Progress::kIdle);
}

void Reducer::prepare_for_forward() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  noting_errors([&] { check_given_up(); });
  now_ = Times{clock_ns()};
  progress_->move_to(steps_ + 1, Progress::kForward);
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  noting_errors([&] { prepare(outputs); });
}

void Reducer::prepare(const std::vector<at::Tensor>& outputs) {
  if (step_ == Step::kRunning) end_interrupted_step();
  check_late();
  if (!low_precision_) {
    for (const Parameter& param : params_) check_hooked(param);
  }
  check_frozen();
  reset();
  began_ = true;
  ++forwards_;
  for (Parameter& param : params_) param.version = param.tensor._version();
  // After several forwards nobody knows whose backward comes first: unused parameters are then found at its end.
  if (options_.find_unused_parameters && graph_ == Graph::kDynamic && forwards_ == 1) {
    RECORD_FUNCTION("drivetrain::search_unused_parameters", std::vector<c10::IValue>());
    const std::unordered_set<Node*> reachable = reachable_nodes(outputs);
    for (size_t i = 0; i < params_.size(); ++i) {
      if (reachable.count(params_[i].accumulator.get()) == 0) unused_.push_back(i);
    }
  }
  step_ = Step::kPrepared;
  progress_->move_to(steps_ + 1, Progress::kBackward);
}

// The step before began and was not finalized. If a gradient is missing, the ranks no longer agree on what is reduced;
// if none is, backward raised after the last one, and all buckets are with the transport.
void Reducer::end_interrupted_step() {
  if (next_bucket_ < buckets_.size()) fail_incomplete();
  wait_for_buckets();
  ++steps_;  // as on ranks where backward did not raise
}

// One gradient has been accumulated into parameter `index`'s .grad (came), or is known to be none.
void Reducer::on_gradient(size_t index, bool came) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  noting_errors([&] { handle_gradient(index, came); });
}

void Reducer::handle_gradient(size_t index, bool came) {
  Parameter& param = params_[index];
  if (weight_ && !is_weighted_ && were_zeroed(index)) {
    weight_.reset();
    kept_weight_ = at::Tensor();
  }
  if (weight_ && !is_weighted_) fail_unweighted();
  auto rpc_context = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
  const bool has_grad = rpc_context ? came : param.tensor.grad().defined();
  if (has_grad) local_used_.data_ptr<int32_t>()[index] = 1;
  if (step_ == Step::kIdle) {
    if (is_collecting_) {
      has_collected_ = true;
      if (torch::autograd::get_current_graph_task_id() == collecting_task_) check_unconsumed(param, came);
    }
    if (has_grad && !param.sparse && !rpc_context && !reuses_memory_) take_gradient(param, 1);
    return;
  }
  if (rpc_context && reuses_memory_) {
    throw_unsupported(
        "optimizer.step_in_backward() does not go together with distributed autograd (torch.distributed.autograd), "
        "which keeps gradients to itself: step after backward.");
  }
  rpc_context_ = std::move(rpc_context);
  if (step_ == Step::kPrepared) begin_backward();
  note_stream(param.tensor.device());
  check_unconsumed(param, came);
  ++param.fired;
  if (steps_ == 0) fired_.push_back(static_cast<int64_t>(index));
  if (graph_ == Graph::kStaticUnknown) return;  // delay_all_reduce() does the rest
  if (graph_ == Graph::kStaticKnown) {
    if (param.fired > param.expected) fail_changed_graph(param);
    if (param.fired < param.expected) return;
  }
  param.without_grad = !has_grad;
  mark_ready(index);
  if (const int64_t step = steps_ - measured_from_; is_measuring_ && step < kMeasuredSteps) {
    const int64_t since = clock_ns() - now_.backward_start - now_.exposed;
    ready_[step * params_.size() + index] = 1e-9 * static_cast<double>(since);
  }
  start_full_buckets_in_backward();
}

void Reducer::begin_backward() {
  check_given_up();
  began_ = true;
  progress_->move_to(steps_ + 1, Progress::kGradients);
  rebuild_buckets();
  for (const auto& [device, arena] : arenas_) note_stream(arena.device());
  step_ = Step::kRunning;
  if (norm_) {
    norm_->forget();
    norm_is_due_ = comm_->want_square_sums(norm_->is_wanted());
  }
  if (steps_ == 0) fired_.clear();
  now_.buckets_reduced = 0;
  now_.exposed = 0;
  now_.backward_start = clock_ns();
  // After several forwards the first of several backwards may leave out what the others use.
  if (forwards_ > 1 && options_.find_unused_parameters) mark_rest_unused_at_end();
  scaling_ = Scaling{};
  if (weight_) {
    weight_sum_ = at::full({1}, *weight_, at::TensorOptions(at::kDouble).device(params_[0].tensor.device()));
    if (kept_weight_.defined()) weight_sum_.add_(kept_weight_);
  } else if (divisor_ > 0 && divisor_ != comm_->size()) {
    scaling_.before = 1.0 / static_cast<double>(divisor_);
  } else if (comm_->averages()) {
    scaling_.as_sum = false;
  } else {
    scaling_.before = 1.0 / comm_->size();
  }
  if (comm_hook_) scaling_.before = 1;  // a hook gets sums, and divides
  replica_hashes_ = at::Tensor();
  if (options_.check_replicas_every > 0 && !is_joining_ && (steps_ + 1) % options_.check_replicas_every == 0) {
    std::vector<at::Tensor> tensors;  // as they are before any is stepped in backward
    for (const Parameter& param : params_) tensors.push_back(param.tensor);
    const at::Tensor mine = hash_of(tensors);
    replica_hashes_ = at::zeros({comm_->size()}, mine.options());
    replica_hashes_.select(0, comm_->rank()).copy_(mine);
  }
  if (graph_ == Graph::kStaticKnown) {
    unused_.clear();
    for (size_t i = 0; i < params_.size(); ++i) {
      if (params_[i].expected == 0) unused_.push_back(i);
    }
  }
  for (size_t index : unused_) {
    params_[index].without_grad = true;
    mark_ready(index);
  }
  unused_.clear();
}

void Reducer::announce(const std::vector<at::Tensor>& outputs) {
  Node* last = nullptr;
  for (const at::Tensor& output : outputs) {
    Node* const node = output.grad_fn().get();
    if (node == nullptr || node == last) continue;
    node->add_pre_hook(std::make_unique<OutputHook>(weak_from_this()));
    last = node;
  }
}

// No forward has prepared this backward, but it is one of the wrapper's: a second one over the same outputs, or one
// whose forward ran under no_sync(). What is in .grad when it ends is reduced as it is; hooks only collect until then,
// so that reentrant checkpoints may bring several gradients of one parameter.
void Reducer::on_output() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (step_ != Step::kIdle || !sync_ || low_precision_) return;
  if (torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr()) return;
  const int task = torch::autograd::get_current_graph_task_id();
  if (is_collecting_ && collecting_task_ == task) return;
  is_collecting_ = true;
  has_collected_ = false;
  collecting_task_ = task;
  for (Parameter& param : params_) param.version = param.tensor._version();
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
    if (const auto self = weak.lock()) self->reduce_announced(task);
  });
}

void Reducer::reduce_announced(int task) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!is_collecting_ || collecting_task_ != task) return;
  is_collecting_ = false;
  // None came: torch.autograd.grad() leaves .grad alone, and so does backward(inputs=...).
  if (!has_collected_ || step_ != Step::kIdle) return;
  const at::NoGradGuard no_grad_tracking;
  noting_errors([&] {
    reset();
    if (graph_ == Graph::kDynamic && !options_.find_unused_parameters) {
      bool is_complete = true;
      for (Parameter& param : params_) is_complete &= param.ready = param.tensor.grad().defined();
      if (!is_complete) fail_incomplete();
    }
    reduce_gradients();
  });
}

void Reducer::mark_rest_unused_at_end() {
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    const std::lock_guard<std::recursive_mutex> lock(self->mutex_);
    if (self->graph_ == Graph::kStaticUnknown) {
      self->delay_all_reduce();
      return;
    }
    const at::NoGradGuard no_grad_tracking;
    if (self->step_ != Step::kRunning || self->next_bucket_ == self->buckets_.size()) return;
    self->noting_errors([&] { self->mark_rest_unused(); });
  });
}

void Reducer::mark_rest_unused() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].ready) continue;
    params_[i].without_grad = params_[i].fired == 0 || !(rpc_context_ || params_[i].tensor.grad().defined());
    mark_ready(i);
  }
  start_full_buckets_in_backward();
}

void Reducer::reduce_collected() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  noting_errors([&] {
    if (step_ == Step::kRunning) end_interrupted_step();
    weight_ = weight_.value_or(0);
    reduce_gradients();
  });
}

// What is in .grad, as a step of its own.
void Reducer::reduce_gradients() {
  misses_times_ = misses_times_ || is_measuring_;  // no gradient's time is seen here
  reset();
  begin_backward();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].ready) continue;
    params_[i].without_grad = !params_[i].tensor.grad().defined();
    mark_ready(i);
  }
  start_full_buckets();
  const Graph graph = graph_;
  finalize();
  graph_ = graph;  // a static graph is still to be counted
}

void Reducer::delay_all_reduce() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  if (graph_ != Graph::kStaticUnknown || step_ == Step::kIdle) return;  // a backward that does not synchronise
  if (step_ == Step::kPrepared) begin_backward();
  for (Parameter& param : params_) param.expected = param.fired;
  noting_errors([&] { mark_rest_unused(); });
}

// ---- Buckets.

// Starts buckets strictly in plan order, so that every rank issues the same collectives in the same order. Returns
// whether all have started, with what the step sums beside them, by this very call.
bool Reducer::start_full_buckets() {
  if (next_bucket_ == buckets_.size()) return false;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].phase == Phase::kFull) {
    if (next_bucket_ == 0) now_.comm_start = clock_ns();
    start(buckets_[next_bucket_]);
    ++next_bucket_;
  }
  if (next_bucket_ < buckets_.size()) return false;
  now_.backward_end = clock_ns();
  const at::Device device = params_[0].tensor.device();
  if (shares_used_map()) {
    global_used_ = copied_to(local_used_, device);
    used_reduce_ = start_sum(global_used_, Purpose::kUsedMap);
  }
  if (weight_) weight_reduce_ = start_sum(weight_sum_, Purpose::kWeights);
  if (replica_hashes_.defined()) replica_reduce_ = start_sum(replica_hashes_, Purpose::kReplicas);
  return true;
}

std::unique_ptr<PendingReduce> Reducer::start_sum(const at::Tensor& flat, Purpose purpose) {
  comm_->set_tag(tag_of(steps_ + 1, purpose));
  return comm_->start_sum(flat);
}

void Reducer::start_full_buckets_in_backward() {
  const bool have_all_started = start_full_buckets();
  hand_over_reduced(/*waits_for=*/0);
  if (!have_all_started) return;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->finalize_backward();
  });
}

bool Reducer::is_skipped(const Bucket& bucket) const {
  if (!options_.skip_unused_buckets) return false;
  for (size_t index : bucket.params) {
    if (!params_[index].without_grad) return false;
  }
  return true;
}

void Reducer::start(Bucket& bucket) {
  bucket.phase = Phase::kReducing;
  // Its gradients may have come on several streams, and those of buckets that are held back with it.
  join_streams(params_[bucket.params[0]].tensor.device());
  if (reuses_memory_) {
    make_room_for(bucket);
    for (size_t index : bucket.params) fill_place(params_[index]);
  }
  if (!is_skipped(bucket)) reduce(bucket);
  if (!bucket.ends_group) return;
  try {
    comm_->flush();
  } catch (const std::exception& error) {
    std::string what = *bucket.label;
    for (const Bucket* other = &bucket; other != buckets_.data() && !(--other)->ends_group;) {
      what = *other->label + ", " + what;
    }
    fail_start(what, error);
  }
}

void Reducer::reduce(Bucket& bucket) {
  const size_t index = &bucket - buckets_.data();
  RECORD_FUNCTION("drivetrain::all_reduce", (std::vector<c10::IValue>{bucket.flat, static_cast<int64_t>(index)}));
  ++now_.buckets_reduced;
  // Hooks may wait in here, and so does a transport that has too many buckets under way.
  const Progress::Wait wait(*progress_, bucket.label, place_of(index));
  const Stopwatch stopwatch(now_.exposed);
  if (comm_hook_) {
    HookBucket seen{index, buckets_.size(), bucket.flat, {}, {}};
    for (size_t i : bucket.params) {
      const Parameter& param = params_[i];
      seen.offsets.push_back(bucket.sparse ? 0 : param.offset / bucket.flat.element_size());
      seen.params.push_back(param.tensor);
    }
    auto reduce = std::make_unique<HookReduce>(*comm_hook_, seen);
    bucket.hooked = reduce.get();
    bucket.reduce = std::move(reduce);
  } else if (comm_->size() > 1) {
    const bool as_sum = scaling_.as_sum || bucket.sparse;
    if (bucket.tags.defined()) write_tags(bucket);
    const at::Tensor flat = as_real(bucket.tags.defined() ? bucket.tagged : bucket.flat);
    comm_->set_tag(tag_of(steps_ + 1, Purpose::kBucket, index));
    try {
      bucket.reduce = as_sum ? comm_->start_sum(flat) : comm_->start(flat);
    } catch (const std::exception& error) {
      fail_start(*bucket.label, error);
    }
  }
}

// ---- Ranks that have run out of inputs.

std::unique_ptr<PendingReduce> Reducer::reduce_zeros(size_t index, bool as_sum) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  Bucket& bucket = buckets_.at(index);
  const Parameter& first = params_[bucket.params[0]];
  if (bucket.sparse) {
    bucket.flat = no_rows(first.tensor);
  } else {
    for (size_t i : bucket.params) {
      const at::Tensor& grad = params_[i].tensor.grad();
      if (!bucket.kept.defined() && grad.defined() && is_in_place(params_[i], grad)) bucket.kept = bucket.flat.clone();
      leave_to_holders(params_[i]);
    }
    bucket.flat.zero_();
  }
  scaling_ = Scaling{1, as_sum || !comm_->averages()};
  start(bucket);
  return std::move(bucket.reduce);
}

void Reducer::wait_for_zeros(size_t index, PendingReduce& reduce) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  noting_errors([&] {
    wait_for(reduce, buckets_.at(index).label, place_of(index));
    Bucket& bucket = buckets_[index];
    check_tags(bucket);
    if (bucket.kept.defined()) bucket.flat.copy_(bucket.kept);  // its own of the last step, as with torch
    bucket.kept = at::Tensor();
  });
}

// The same on all ranks, although one that has run out of inputs has not seen a static graph.
bool Reducer::shares_used_map() const {
  return graph_ == Graph::kDynamic ? options_.find_unused_parameters : steps_ == 0;
}

// As torch's: what this rank's last step found used, on whichever rank, it goes on calling used, so that the others'
// .grad of such a parameter is their mean even if none of them uses it any more.
void Reducer::shadow_used_map() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!shares_used_map()) return;
  const at::Device device = params_[0].tensor.device();
  const bool repeats = graph_ == Graph::kDynamic && global_used_.defined();
  at::Tensor used = repeats ? global_used_.clamp_max(1).to(device) : at::zeros_like(local_used_, device);
  wait_for(*start_sum(used, Purpose::kUsedMap), kUsedMap, place_of_all());
  if (graph_ == Graph::kDynamic) {
    global_used_ = used;
    return;
  }
  used = used.cpu();
  for (size_t i = 0; i < params_.size(); ++i) params_[i].used_somewhere = used.data_ptr<int32_t>()[i] > 0;
}

void Reducer::count_shadowed_step() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  misses_times_ = misses_times_ || is_measuring_;
  ++steps_;
  reset();
}

// ---- A step's end.

// What a hook returned, where the transport would have left it.
void Reducer::finish_bucket(Bucket& bucket) {
  if (bucket.hooked == nullptr) return;
  const at::Tensor& result = bucket.hooked->result();
  if (result.is_same(bucket.flat)) return;
  if (result.numel() != bucket.flat.numel()) {
    throw_type_error(text("the communication hook returned a tensor of ", result.numel(), " elements for ",
                          *bucket.label, ", expected as many as bucket.buffer() has: ", bucket.flat.numel()));
  }
  // In mixed precision the hook has made the gradients full precision again: they get the sum as it came.
  if (low_precision_) {
    for (size_t index : bucket.params) {
      Parameter& param = params_[index];
      at::Tensor& grad = param.tensor.mutable_grad();
      if (!grad.defined() || grad.scalar_type() == grad_dtype(param)) continue;
      const int64_t first = param.offset / bucket.flat.element_size();
      const at::Tensor piece = result.narrow(0, first, param.tensor.numel());
      grad.copy_(piece.as_strided(param.tensor.sizes(), param.view.strides(), piece.storage_offset()));
      param.differentiable = at::Tensor();
    }
    return;
  }
  if (bucket.sparse || !result.is_alias_of(bucket.flat) || result.scalar_type() != bucket.flat.scalar_type()) {
    bucket.flat.copy_(bucket.sparse ? result : result.reshape({-1}));
  }
}

// Whether a bucket that is reduced is done with; else what becomes of it is known at the end of backward only.
bool Reducer::can_hand_over_early() const {
  return on_reduced_ && !shares_used_map() && !options_.skip_unused_buckets && !low_precision_ && !rpc_context_;
}

// Hands over what is reduced by now, in order, and waits for the first so many buckets.
void Reducer::hand_over_reduced(size_t waits_for) {
  if (!can_hand_over_early()) return;
  while (next_to_hand_over_ < next_bucket_) {
    Bucket& bucket = buckets_[next_to_hand_over_];
    if (bucket.reduce) {
      const bool is_there = !bucket.reduce->is_held_back() && bucket.reduce->is_done();
      if (!is_there && next_to_hand_over_ >= waits_for) return;
      wait_for(*bucket.reduce, bucket.label, place_of(next_to_hand_over_));
      check_tags(bucket);
      finish_bucket(bucket);
    }
    for (size_t i : bucket.params) finish_param(params_[i], !params_[i].without_grad || params_[i].used_somewhere);
    hand_over_next();
  }
}

// Until nothing of the buckets before it lies where it shall lie.
void Reducer::make_room_for(const Bucket& bucket) {
  const size_t index = &bucket - buckets_.data();
  size_t waits_for = next_to_hand_over_;
  for (size_t i = next_to_hand_over_; i < index && !bucket.sparse; ++i) {
    const Bucket& before = buckets_[i];
    const bool is_apart = before.sparse || before.flat.device() != bucket.flat.device() ||
                          before.end <= bucket.offset || bucket.end <= before.offset;
    if (!is_apart) waits_for = i + 1;
  }
  if (waits_for > next_to_hand_over_) hand_over_reduced(waits_for);
  DT_INVARIANT(next_to_hand_over_ >= waits_for);
}

// An error of whom it is handed to is raised once backward has reduced everything: other ranks wait for that.
void Reducer::hand_over_next() {
  const Bucket& bucket = buckets_[next_to_hand_over_++];
  try {
    if (!hand_over_error_) on_reduced_(bucket.params, next_to_hand_over_ == buckets_.size());
  } catch (...) {
    hand_over_error_ = std::current_exception();
  }
  for (size_t i = 0; reuses_memory_ && i < bucket.params.size(); ++i) {
    const Parameter& param = params_[bucket.params[i]];
    at::Tensor& grad = param.tensor.mutable_grad();
    if (grad.defined() && grad.is_same(param.view)) grad = grad.clone();  // the next bucket's lie there
  }
}

void Reducer::wait_for_buckets() {
  RECORD_FUNCTION("drivetrain::wait_for_all_reduces", std::vector<c10::IValue>());
  for (size_t i = next_to_hand_over_; i < buckets_.size(); ++i) {
    const Bucket& bucket = buckets_[i];
    if (!bucket.reduce) continue;
    RECORD_FUNCTION("drivetrain::wait", std::vector<c10::IValue>{static_cast<int64_t>(i)});
    wait_for(*bucket.reduce, bucket.label, place_of(i));
    check_tags(bucket);
  }
  if (used_reduce_) wait_for(*used_reduce_, kUsedMap, place_of_all());
  if (weight_reduce_) wait_for(*weight_reduce_, kWeights, place_of_all());
  if (replica_reduce_) wait_for(*replica_reduce_, kReplicas, place_of_all());
}

void Reducer::wait_for(PendingReduce& reduce, const std::shared_ptr<const std::string>& what, int64_t needed) {
  try {
    const Progress::Wait wait(*progress_, what, needed);
    reduce.wait();
  } catch (const std::exception& error) {
    if (comm_hook_) {  // the hook's own error, in its own kind; the other ranks go on, so that the rest ends
      drain();
      forget_step();
      throw;
    }
    const std::string report = error.what(), all_reduce = "the all-reduce of " + *what;
    forget_step();
    fail_collective(all_reduce, report);
  }
}

// Waits for what is under way in a step that has failed or is given up. Another failure then says nothing new.
void Reducer::drain() {
  const auto finish = [](const std::unique_ptr<PendingReduce>& reduce) {
    if (!reduce || reduce->is_held_back()) return;
    try {
      reduce->wait();
    } catch (const std::exception& error) {
      TORCH_WARN("drivetrain: in a step that is given up, a reduction has failed: ", error.what());
    }
  };
  for (const Bucket& bucket : buckets_) finish(bucket.reduce);
  finish(used_reduce_);
  finish(weight_reduce_);
  finish(replica_reduce_);
}

// reset(), and what was given for this step alone.
void Reducer::forget_step() {
  reset();
  weight_.reset();
  kept_weight_ = at::Tensor();
  divisor_ = 0;
  forwards_ = 0;
  is_joining_ = false;
  end_callbacks_.clear();
  hand_over_error_ = nullptr;
}

void Reducer::finalize_backward() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  noting_errors([&] { finalize(); });
}

void Reducer::finalize() {
  for (const auto& [device, arena] : arenas_) join_streams(arena.device());
  {
    const Stopwatch stopwatch(now_.exposed);
    wait_for_buckets();
  }
  ++steps_;  // whatever comes now: ranks must agree on their number
  now_.comm_end = clock_ns();
  last_ = now_;
  std::vector<double>& exposed = plan_report_.exposed_s;
  if (exposed.size() == kExposedKept) exposed.erase(exposed.begin());
  exposed.push_back(1e-9 * static_cast<double>(now_.exposed));
  try {
    for (size_t i = next_to_hand_over_; i < buckets_.size(); ++i) finish_bucket(buckets_[i]);
  } catch (...) {
    forget_step();
    throw;
  }
  if (weight_) divide_by_weights();
  bool any_unused = false;
  std::vector<bool> unused;
  for (const Parameter& param : params_) {
    unused.push_back(param.without_grad);
    any_unused |= param.without_grad;
  }
  if (steps_ > 1 && unused != last_unused_) is_graph_static_ = false;
  last_unused_ = std::move(unused);
  // The one host wait for a device, and only where something is unused here.
  if (used_reduce_ && (any_unused || graph_ == Graph::kStaticUnknown)) global_used_ = global_used_.cpu();
  for (size_t i = 0; i < params_.size(); ++i) {
    Parameter& param = params_[i];
    bool used_somewhere = !param.without_grad || param.used_somewhere;
    if (param.without_grad && used_reduce_) used_somewhere = global_used_.data_ptr<int32_t>()[i] > 0;
    if (param.without_grad && is_skipped(buckets_[param.bucket])) used_somewhere = false;
    if (graph_ == Graph::kStaticUnknown) param.used_somewhere = used_somewhere;
    const bool is_left = !optimizer_in_backward_ && !low_precision_ && param.bucket >= next_to_hand_over_;
    if (is_left) finish_param(param, used_somewhere);
  }
  if (graph_ == Graph::kStaticUnknown) graph_ = Graph::kStaticKnown;
  while (on_reduced_ && next_to_hand_over_ < buckets_.size()) hand_over_next();
  if (norm_ && norm_is_due_) share_norm();
  local_used_.zero_();
  weight_.reset();
  kept_weight_ = at::Tensor();
  divisor_ = 0;
  forwards_ = 0;
  misses_times_ = misses_times_ || (is_joining_ && is_measuring_);
  is_joining_ = false;
  progress_->end_step();
  if (const auto stream = stream_on(params_[0].tensor.device())) {
    if (!device_end_) device_end_ = std::make_shared<c10::Event>(stream->device_type());
    const auto has_ended = [end = device_end_] {
      try {
        return end->query();
      } catch (const c10::Error&) {
        // The step was captured into a CUDA graph, whose replays do not pass here; or the device has failed, which the
        // training thread finds out by itself.
        return true;
      }
    };
    progress_->end_on_device([&] { device_end_->record(*stream); }, has_ended);
  }
  const bool compare = replica_reduce_ != nullptr;
  const std::exception_ptr error = std::exchange(hand_over_error_, nullptr);
  std::vector<std::function<void()>> callbacks = std::move(end_callbacks_);
  end_callbacks_.clear();
  reset();
  for (const auto& callback : callbacks) callback();
  if (error) std::rethrow_exception(error);
  if (compare) compare_replicas();
}

// Where .grad is what the transport has left, and nothing else, everywhere.
void Reducer::share_norm() {
  if (weight_ || scaling_.as_sum || comm_hook_ || optimizer_in_backward_ || low_precision_ || rpc_context_) return;
  grad::Gradients gradients;
  gradients.reserve(params_.size());
  for (const Parameter& param : params_) {
    const at::Tensor& grad = param.tensor.grad();
    if (param.sparse || param.delegated || !grad.is_same(param.view) ||
        (param.without_grad && param.untouched.defined()))
      return;
    gradients.push_back(grad.unsafeGetTensorImpl());
  }
  std::optional<double> sum = 0;
  for (const Bucket& bucket : buckets_) {
    const std::optional<double> of_bucket = bucket.reduce ? bucket.reduce->square_sum() : std::nullopt;
    sum = sum && of_bucket ? std::optional(*sum + *of_bucket) : std::nullopt;
  }
  norm_->publish(std::move(gradients), sum);
}

// ---- What was seen.

Reducer::Times Reducer::times() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return last_;
}

bool Reducer::is_graph_static() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return is_graph_static_;
}

at::Tensor Reducer::used_map() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::Tensor& used = global_used_.defined() ? global_used_ : local_used_;
  return used.is_cpu() ? copied_to(used, params_[0].tensor.device()) : used.clone();
}

}  // namespace drivetrain::ddp
