// The reducer's hooks and phases; see reducer.h for the life of a step.
#include "ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

using torch::autograd::Node;

constexpr size_t kNamesShown = 10;

template <class Names>
std::string joined(const Names& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) out += (i ? ", " : "") + names[i];
  if (names.size() > kNamesShown) out += text(", and ", names.size() - kNamesShown, " more");
  return out;
}

// Autograd carries errors from hooks to Python: only torch's own kinds keep their kind on the way.
[[noreturn]] void throw_unsupported(const std::string& message) { C10_THROW_ERROR(NotImplementedError, message); }
[[noreturn]] void throw_type_error(const std::string& message) { C10_THROW_ERROR(TypeError, message); }

// Strides that a parameter's gradient should have (torch's gradient layout contract): the parameter's own where it is
// dense, else row-major.
std::vector<int64_t> grad_strides(const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) return param.strides().vec();
  std::vector<int64_t> strides(param.dim(), 1);
  for (int64_t d = param.dim() - 2; d >= 0; --d) strides[d] = strides[d + 1] * std::max<int64_t>(param.size(d + 1), 1);
  return strides;
}

// A tensor over part of the arena that shares its life but has a storage of its own: saving or copying one gradient
// never touches the others, and its version counter is its own.
at::Tensor piece_of(const at::Tensor& arena, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides,
                    at::ScalarType dtype) {
  const auto keep_arena = [arena](void*) {};
  return at::from_blob(static_cast<char*>(arena.data_ptr()) + offset, sizes, strides, keep_arena,
                       arena.options().dtype(dtype), arena.device());
}

// Which reducer has each parameter's gradient during a synchronised backward: two wrappers around one parameter take
// turns well, but cannot both reduce it in one backward. Kept only while there are several reducers.
std::atomic<int> num_reducers{0};
std::mutex takers_mutex;
std::unordered_map<const c10::TensorImpl*, const Reducer*> takers;

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

std::shared_ptr<Reducer> Reducer::make(std::vector<at::Tensor> params, std::vector<std::string> names,
                                       std::shared_ptr<Comm> comm, const Options& options) {
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(params), std::move(names), std::move(comm), options));
  reducer->add_hooks();
  return reducer;
}

Reducer::Reducer(std::vector<at::Tensor> params, std::vector<std::string> names, std::shared_ptr<Comm> comm,
                 const Options& options)
    : comm_(std::move(comm)), find_unused_(options.find_unused_parameters) {
  DT_INVARIANT(!params.empty() && params.size() == names.size());
  for (size_t i = 0; i < params.size(); ++i) {
    Parameter& param = params_.emplace_back();
    param.tensor = std::move(params[i]);
    param.name = std::move(names[i]);
  }
  // As a tensor: the overloads that take a number make a temporary as large as the gradient.
  scale_ = at::scalar_tensor(1.0 / comm_->size(), at::kDouble);
  scale_.unsafeGetTensorImpl()->set_wrapped_number(true);
  local_used_ = at::zeros({static_cast<int64_t>(params_.size())}, at::kInt);
  build_arena(options);
  scaled_ = !comm_->averages() && comm_->size() > 1;
  ++num_reducers;
}

void Reducer::build_arena(const Options& options) {
  // Parameters share buckets by device and dtype. The order in which gradients come is, until measured, the reverse of
  // the order in which modules were registered.
  std::map<std::pair<std::string, at::ScalarType>, int64_t> groups;
  std::vector<ParamSize> sizes;
  std::vector<int64_t> order;
  for (const Parameter& param : params_) {
    const auto key = std::make_pair(param.tensor.device().str(), param.tensor.scalar_type());
    const int64_t group = groups.emplace(key, static_cast<int64_t>(groups.size())).first->second;
    sizes.push_back({param.tensor.numel(), static_cast<int64_t>(param.tensor.element_size()), group});
    order.insert(order.begin(), static_cast<int64_t>(order.size()));
  }
  const std::vector<BucketPlan> plans = plan_buckets(sizes, order, options.bucket_caps);

  std::map<std::string, int64_t> device_bytes;
  for (const BucketPlan& plan : plans) {
    device_bytes[params_[plan.slots[0].param].tensor.device().str()] += plan.bytes;
  }
  std::map<std::string, std::pair<at::Tensor, int64_t>> arenas;  // with the bytes given out so far
  for (const BucketPlan& plan : plans) {
    const at::Tensor& first = params_[plan.slots[0].param].tensor;
    auto [it, is_new] = arenas.try_emplace(first.device().str());
    auto& [arena, used] = it->second;
    if (is_new) {
      const int64_t bytes = device_bytes[it->first];
      arena = comm_->allocate(bytes, first.device());
      arena_bytes_ += bytes;
    }
    Bucket& bucket = buckets_.emplace_back();
    const at::ScalarType real = c10::toRealValueType(first.scalar_type());
    bucket.flat = piece_of(arena, used, {plan.bytes / static_cast<int64_t>(c10::elementSize(real))}, {1}, real);
    for (const Slot& slot : plan.slots) {
      Parameter& param = params_[slot.param];
      param.bucket = buckets_.size() - 1;
      param.offset = slot.offset;
      param.view = view_of(param);
      bucket.params.push_back(slot.param);
    }
    used += plan.bytes;
  }
  reset();
}

at::Tensor Reducer::view_of(const Parameter& param) const {
  return piece_of(buckets_[param.bucket].flat, param.offset, param.tensor.sizes(), grad_strides(param.tensor),
                  param.tensor.scalar_type());
}

void Reducer::add_hooks() {
  for (size_t i = 0; i < params_.size(); ++i) {
    Parameter& param = params_[i];
    auto accumulator = torch::autograd::impl::grad_accumulator(param.tensor);
    // Weak: a graph may outlive the wrapper.
    auto hook = [weak = weak_from_this(), i](const torch::autograd::variable_list& outputs,
                                             const torch::autograd::variable_list&) {
      if (const auto self = weak.lock()) self->on_gradient(i);
      return outputs;
    };
    // Without a function for compiled autograd: that refuses the hook with an error instead of leaving it out.
    param.hook = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(std::move(hook)));
    // The parameter refers to its accumulator weakly: without this reference both would go.
    param.accumulator = std::shared_ptr<Node>(accumulator.get(), [accumulator](Node*) {});
  }
}

Reducer::~Reducer() {
  release_params();
  --num_reducers;
  for (Parameter& param : params_) {
    if (param.accumulator) param.accumulator->del_post_hook(param.hook);
  }
}

void Reducer::remove_autograd_hooks() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Parameter& param : params_) {
    if (param.accumulator) param.accumulator->del_post_hook(param.hook);
    param.accumulator.reset();
  }
}

void Reducer::claim(const Parameter& param) const {
  if (num_reducers == 1) return;
  const std::lock_guard<std::mutex> lock(takers_mutex);
  const Reducer* taker = takers.emplace(param.tensor.unsafeGetTensorImpl(), this).first->second;
  if (taker == this) return;
  throw_unsupported(text("parameter '", param.name,
                         "' belongs to two DistributedDataParallel wrappers, and both are to reduce it in the same "
                         "backward: wrap it once, or use one of the wrappers under no_sync()."));
}

void Reducer::release_params() const {
  const std::lock_guard<std::mutex> lock(takers_mutex);
  if (takers.empty()) return;
  for (const Parameter& param : params_) {
    const auto found = takers.find(param.tensor.unsafeGetTensorImpl());
    if (found != takers.end() && found->second == this) takers.erase(found);
  }
}

void Reducer::reset() {
  release_params();
  for (Parameter& param : params_) {
    param.ready = false;
    param.without_grad = false;
    param.untouched = at::Tensor();
  }
  for (Bucket& bucket : buckets_) {
    bucket.missing = bucket.params.size();
    bucket.phase = Phase::kFilling;
    bucket.reduce.reset();
  }
  next_bucket_ = 0;
  unused_.clear();
  used_reduce_.reset();
  step_ = Step::kIdle;
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (step_ == Step::kRunning) end_interrupted_step();
  for (const Parameter& param : params_) check_hooked(param);
  reset();
  if (find_unused_) {
    const std::unordered_set<Node*> reachable = reachable_nodes(outputs);
    for (size_t i = 0; i < params_.size(); ++i) {
      if (reachable.count(params_[i].accumulator.get()) == 0) unused_.push_back(i);
    }
  }
  step_ = Step::kPrepared;
}

// The step before began and was not finalized. If a gradient is missing, the ranks no longer agree on what is reduced;
// if none is, backward raised after the last one, and all buckets are with the transport.
void Reducer::end_interrupted_step() {
  if (next_bucket_ < buckets_.size()) fail_incomplete();
  wait_for_buckets();
}

// module.to(dtype) and the like give a parameter a new gradient accumulator: our hook would sit on the old one, and
// nothing would be reduced any more.
void Reducer::check_hooked(const Parameter& param) const {
  if (!param.accumulator) return;  // hooks were removed on purpose
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param.tensor);
  if (accumulator.get() == param.accumulator.get()) return;
  throw EnvironmentError(text("parameter '", param.name,
                              "' was changed after DistributedDataParallel wrapped it (by .half(), .double(), .to() or "
                              "an assignment to .data of another type), so that its gradient would no longer be "
                              "reduced: convert the module first and wrap it then."));
}

// One gradient has been accumulated into parameter `index`'s .grad, or is known to be none.
void Reducer::on_gradient(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  Parameter& param = params_[index];
  const bool has_grad = param.tensor.grad().defined();
  if (has_grad) local_used_.data_ptr<int32_t>()[index] = 1;
  if (step_ == Step::kIdle) {
    if (has_grad) take_gradient(param, /*scaled=*/false);
    return;
  }
  if (step_ == Step::kPrepared) begin_backward();
  param.without_grad = !has_grad;
  mark_ready(index);
  start_full_buckets();
}

void Reducer::begin_backward() {
  step_ = Step::kRunning;
  for (size_t index : unused_) {
    params_[index].without_grad = true;
    mark_ready(index);
  }
}

void Reducer::check_gradient(const Parameter& param, const at::Tensor& grad) const {
  const at::Tensor& tensor = param.tensor;
  if (grad.requires_grad()) {
    throw_unsupported(text("the gradient of parameter '", param.name,
                           "' itself requires a gradient (backward with create_graph=True), which drivetrain's "
                           "DistributedDataParallel does not support yet: use torch's for double backward."));
  }
  if (grad.layout() != at::kStrided) {
    throw_unsupported(text("the gradient of parameter '", param.name,
                           "' is sparse, which drivetrain's DistributedDataParallel does not support yet: set "
                           "sparse=False in its Embedding, or use torch's DistributedDataParallel."));
  }
  if (grad.scalar_type() != tensor.scalar_type() || grad.device() != tensor.device() ||
      !grad.sizes().equals(tensor.sizes())) {
    throw_type_error(text("the gradient of parameter '", param.name, "' is ", grad.scalar_type(), " ", grad.sizes(),
                          " on ", grad.device().str(), ", expected ", tensor.scalar_type(), " ", tensor.sizes(), " on ",
                          tensor.device().str(),
                          ": do not assign .grad or set grad_dtype to another type under "
                          "DistributedDataParallel."));
  }
}

// One pass from `values` to the parameter's place in the arena.
void Reducer::fill_view(const Parameter& param, const at::Tensor& values, bool scaled) const {
  at::Tensor view = param.view;
  if (scaled) {
    at::mul_out(view, values, scale_);
  } else {
    view.copy_(values);
  }
}

// Moves .grad to its place in the arena, divided by the number of ranks if it is about to be summed, and lets .grad be
// that place.
void Reducer::take_gradient(Parameter& param, bool scaled) {
  at::Tensor& grad = param.tensor.mutable_grad();
  check_gradient(param, grad);
  const void* place = static_cast<char*>(buckets_[param.bucket].flat.data_ptr()) + param.offset;
  if (grad.data_ptr() == place && grad.strides().equals(param.view.strides())) {
    if (scaled) grad.mul_(scale_);
    return;
  }
  // Someone assigned to .grad.data, and with that to our view: give out a new one.
  if (grad.is_same(param.view)) param.view = view_of(param);
  fill_view(param, grad, scaled);
  grad = param.view;
}

void Reducer::mark_ready(size_t index) {
  Parameter& param = params_[index];
  if (param.ready) {
    throw EnvironmentError(text(
        "Expected to mark a variable ready only once, but parameter '", param.name,
        "' got a second gradient in the same synchronised backward. Either it is used in several reentrant backward "
        "passes (torch.utils.checkpoint with use_reentrant=True: pass use_reentrant=False), or it is used outside "
        "the wrapped module's forward (call the wrapper, not its .module), or backward ran twice after one forward."));
  }
  param.ready = true;
  claim(param);
  if (!param.without_grad) {
    take_gradient(param, scaled_);
  } else if (const at::Tensor& kept = param.tensor.grad(); kept.defined()) {
    // Other ranks may have used it: then this rank's share is what it has kept so far.
    check_gradient(param, kept);
    param.untouched = kept.clone();
    fill_view(param, param.untouched, scaled_);
  } else {
    param.view.zero_();
  }
  Bucket& bucket = buckets_[param.bucket];
  DT_INVARIANT(bucket.missing > 0);
  if (--bucket.missing == 0) bucket.phase = Phase::kFull;
}

// Starts buckets strictly in plan order, so that every rank issues the same collectives in the same order.
void Reducer::start_full_buckets() {
  if (next_bucket_ == buckets_.size()) return;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].phase == Phase::kFull) {
    Bucket& bucket = buckets_[next_bucket_];
    bucket.reduce = comm_->start(bucket.flat);
    bucket.phase = Phase::kReducing;
    ++next_bucket_;
  }
  if (next_bucket_ < buckets_.size()) return;
  if (find_unused_) {
    global_used_ = local_used_.to(params_[0].tensor.device(), /*non_blocking=*/false, /*copy=*/true);
    used_reduce_ = comm_->start_sum(global_used_);
  }
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->finalize_backward();
  });
}

// Also for parameters that had a gradient: another hook may have re-pointed .grad since (that of a second wrapper
// around the same parameter does).
void Reducer::finish_param(Parameter& param, bool used_somewhere) {
  at::Tensor& grad = param.tensor.mutable_grad();
  if (used_somewhere) {
    if (!grad.is_same(param.view)) grad = param.view;
  } else if (param.untouched.defined()) {
    grad.copy_(param.untouched);
  }
}

void Reducer::wait_for_buckets() {
  for (Bucket& bucket : buckets_) wait_for(*bucket.reduce, describe(bucket));
  if (used_reduce_) wait_for(*used_reduce_, "the map of used parameters");
}

void Reducer::wait_for(PendingReduce& reduce, const std::string& what) {
  try {
    reduce.wait();
  } catch (const std::exception& error) {
    const std::string report = error.what();
    reset();
    throw EnvironmentError(text("drivetrain: the all-reduce of ", what,
                                " failed; a rank has probably died or hangs, look for the first error in the others' "
                                "logs. The process group reports: ",
                                report));
  }
}

void Reducer::finalize_backward() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  wait_for_buckets();
  bool any_unused = false;
  for (const Parameter& param : params_) any_unused |= param.without_grad;
  // The one host wait for a device, and only where something is unused here.
  if (find_unused_ && any_unused) global_used_ = global_used_.cpu();
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool used_somewhere = !params_[i].without_grad || !find_unused_ || global_used_.data_ptr<int32_t>()[i] > 0;
    finish_param(params_[i], used_somewhere);
  }
  local_used_.zero_();
  reset();
}

std::string Reducer::describe(const Bucket& bucket) const {
  std::vector<std::string> names;
  for (size_t index : bucket.params) names.push_back(params_[index].name);
  return text("bucket ", &bucket - buckets_.data(), " of ", buckets_.size(), " [", joined(names), "]");
}

void Reducer::fail_incomplete() const {
  std::vector<std::string> names;
  for (const Parameter& param : params_) {
    if (!param.ready) names.push_back(param.name);
  }
  throw EnvironmentError(text(
      "Expected to have finished reduction in the prior iteration before starting a new one: these parameters got no "
      "gradient in it: ",
      joined(names),
      ". If some are not used in every forward, pass find_unused_parameters=True to DistributedDataParallel; make sure "
      "that every output of forward that needs a gradient takes part in the loss."));
}

void Reducer::check_finalized() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (step_ == Step::kRunning) fail_incomplete();
}

std::vector<Reducer::BucketInfo> Reducer::buckets() const {
  std::vector<BucketInfo> infos;
  for (const Bucket& bucket : buckets_) {
    BucketInfo info;
    for (size_t index : bucket.params) info.names.push_back(params_[index].name);
    info.bytes = static_cast<int64_t>(bucket.flat.nbytes());
    info.dtype = c10::toString(params_[bucket.params[0]].tensor.scalar_type());
    infos.push_back(std::move(info));
  }
  return infos;
}

at::Tensor Reducer::local_used_map() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return local_used_.clone();
}

}  // namespace drivetrain::ddp
