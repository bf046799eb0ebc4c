// The reducer's hooks and phases; see reducer.h for the life of a step.
#include "ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/heap.h"
#include "ddp/replicas.h"

namespace drivetrain::ddp {
namespace {

using torch::autograd::Node;

constexpr size_t kNamesShown = 10;

// After the step whose gradients gave the order.
constexpr int64_t kMeasuredSteps = 3;
constexpr size_t kExposedKept = 64;
// Timed once for the plan, each as often as it takes for a median.
constexpr int64_t kProbeBytes[] = {64 << 10, 1 << 20, 4 << 20, 16 << 20};
constexpr int kProbes = 5;

// Why a plan from measurement is not made; numbers, so that ranks can tell each other.
constexpr const char* kObstacles[] = {
    "",
    "a communication hook reduces",
    "a rank ran out of inputs in the steps that were to be measured",
    "the script keeps references to .grad tensors, which must go on showing their parameters' gradients",
};
// A bucket below it costs a collective's latency whatever its size; not tuned.
constexpr int64_t kSmallBucket = 256 << 10;

template <class Names>
std::string joined(const Names& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) out += (i ? ", " : "") + names[i];
  if (names.size() > kNamesShown) out += text(", and ", names.size() - kNamesShown, " more");
  return out;
}

// Autograd carries errors from hooks to Python: only torch's own kinds keep their kind on the way.
[[noreturn]] void throw_unsupported(const std::string& message) { C10_THROW_ERROR(NotImplementedError, message); }
[[noreturn]] void throw_value_error(const std::string& message) { C10_THROW_ERROR(ValueError, message); }
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

// Several wrappers may hold one parameter. Which of them has its gradient in a synchronised backward (they take turns
// well; in one backward the first to come reduces it for both), and how many expect it. Kept only while there are
// several reducers.
std::atomic<int> num_reducers{0};
std::mutex shared_mutex;
struct Taker {
  const void* reducer;
  int backward;  // autograd's number of it
};
std::unordered_map<const c10::TensorImpl*, Taker> takers;
std::unordered_map<const c10::TensorImpl*, int> wanted;

// A factor as a tensor: the overloads that take a number make a temporary as large as the gradient.
at::Tensor as_scalar(double value) {
  at::Tensor scalar = at::scalar_tensor(value, at::kDouble);
  scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
  return scalar;
}

std::shared_ptr<const std::string> label(const char* what) { return std::make_shared<const std::string>(what); }

// What is waited for beside buckets.
const auto kOrder = label("the broadcast of the buckets' order");
const auto kCuts = label("the broadcast of the buckets' sizes");
const auto kUsedMap = label("the map of used parameters");
const auto kWeights = label("the weights");
const auto kReplicas = label("the replicas' checksums");
const auto kParameters = label("the parameters' checksums");

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Adds the time from its construction to its end.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t& sum) : sum_(sum), begin_(clock_ns()) {}
  ~Stopwatch() { sum_ += clock_ns() - begin_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  int64_t& sum_;
  const int64_t begin_;
};

// An empty sparse gradient, sparse in its first dimension as an Embedding's is.
at::Tensor no_rows(const at::Tensor& param) {
  const auto options = at::TensorOptions(param.scalar_type()).device(param.device()).layout(at::kSparse);
  return at::_sparse_coo_tensor_with_dims(1, param.dim() - 1, param.sizes(), options);
}

// As transports take it.
at::Tensor as_real(const at::Tensor& flat) { return flat.is_complex() ? at::view_as_real(flat).flatten() : flat; }

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
    : comm_(std::move(comm)), options_(options) {
  DT_INVARIANT(!params.empty() && params.size() == names.size() && params.size() == options.sparse.size());
  for (size_t i = 0; i < params.size(); ++i) {
    Parameter& param = params_.emplace_back();
    param.tensor = std::move(params[i]);
    param.name = std::move(names[i]);
    param.sparse = options.sparse[i];
  }
  local_used_ = at::zeros({static_cast<int64_t>(params_.size())}, at::kInt);
  int64_t largest = 0;
  for (const Parameter& param : params_) {
    if (param.tensor.is_cpu() && !param.sparse) largest = std::max<int64_t>(largest, param.tensor.nbytes());
  }
  keep_freed_memory(largest);  // a backward frees each gradient once it is in the arena
  build_arena(plan(registration_order()));
  ++num_reducers;
}

at::ScalarType Reducer::grad_dtype(const Parameter& param) const {
  return low_precision_ && param.tensor.is_floating_point() ? *low_precision_ : param.tensor.scalar_type();
}

// Until measured, gradients are expected in the reverse of the order in which modules were registered.
std::vector<int64_t> Reducer::registration_order() const {
  std::vector<int64_t> order;
  for (size_t i = params_.size(); i > 0; --i) order.push_back(static_cast<int64_t>(i) - 1);
  return order;
}

// Parameters share buckets by device and dtype; a sparse one shares with none.
std::vector<ParamSize> Reducer::param_sizes() const {
  std::map<std::pair<std::string, at::ScalarType>, int64_t> groups;
  int64_t num_groups = 0;
  std::vector<ParamSize> sizes;
  for (const Parameter& param : params_) {
    const auto key = std::make_pair(param.tensor.device().str(), grad_dtype(param));
    const int64_t group = param.sparse ? num_groups : groups.try_emplace(key, num_groups).first->second;
    num_groups = std::max(num_groups, group + 1);
    sizes.push_back({param.tensor.numel(), static_cast<int64_t>(c10::elementSize(key.second)), group});
  }
  return sizes;
}

std::vector<BucketPlan> Reducer::plan(const std::vector<int64_t>& order) const {
  return plan_buckets(param_sizes(), order, options_.bucket_caps);
}

void Reducer::build_arena(const std::vector<BucketPlan>& plans) {
  const auto device_of = [&](const BucketPlan& plan) { return params_[plan.slots[0].param].tensor.device(); };
  const auto is_sparse = [&](const BucketPlan& plan) { return params_[plan.slots[0].param].sparse; };
  std::map<std::string, int64_t> bytes;
  for (const BucketPlan& plan : plans) {
    if (!is_sparse(plan)) bytes[device_of(plan).str()] += plan.bytes;
  }
  buckets_.clear();
  arena_bytes_ = 0;
  std::map<std::string, int64_t> used;
  for (const BucketPlan& plan : plans) {
    Bucket& bucket = buckets_.emplace_back();
    bucket.sparse = is_sparse(plan);
    if (!bucket.sparse) {
      const std::string device = device_of(plan).str();
      at::Tensor& arena = arenas_[device];
      if (!arena.defined() || arena.numel() != bytes[device]) {
        arena = comm_->allocate(bytes[device], device_of(plan));
      }
      const at::ScalarType dtype = grad_dtype(params_[plan.slots[0].param]);
      const int64_t numel = plan.bytes / static_cast<int64_t>(c10::elementSize(dtype));
      bucket.flat = piece_of(arena, used[device], {numel}, {1}, dtype);
      used[device] += plan.bytes;
      arena_bytes_ += plan.bytes;
    }
    for (const Slot& slot : plan.slots) {
      Parameter& param = params_[slot.param];
      param.bucket = buckets_.size() - 1;
      param.offset = slot.offset;
      param.view = bucket.sparse ? at::Tensor() : view_of(param);
      bucket.params.push_back(slot.param);
    }
    bucket.missing = bucket.params.size();
  }
  for (Bucket& bucket : buckets_) bucket.label = std::make_shared<const std::string>(describe(bucket));
  // From sizes alone, so that all ranks group alike, whenever whose gradients come.
  int64_t grouped = 0;
  for (Bucket& bucket : buckets_) {
    grouped += bucket.sparse ? kSmallBucket : static_cast<int64_t>(bucket.flat.nbytes());
    bucket.ends_group = grouped >= kSmallBucket || &bucket == &buckets_.back();
    if (bucket.ends_group) grouped = 0;
  }
  plans_ = plans;
  plan_report_ = PlanReport();
}

// Must not depend on what only this rank knows: all communicate then.
bool Reducer::is_rebuild_due() const {
  if (steps_ == 0 || low_precision_) return false;
  if (options_.find_unused_parameters && graph_ == Graph::kDynamic) return false;
  return !is_rebuilt_ || (is_measuring_ && steps_ >= measured_from_ + kMeasuredSteps);
}

void Reducer::rebuild_buckets() {
  if (!is_rebuild_due()) return;
  if (!is_rebuilt_) {
    rebuild_in_order();
  } else {
    rebuild_from_measurement();
  }
}

void Reducer::shadow_planning() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  noting_errors([&] { rebuild_buckets(); });
}

// What the script refers to must go on showing its parameter's gradient: nothing moves if anybody holds such a thing.
bool Reducer::are_views_held() const {
  std::vector<at::Tensor> views;
  for (const Parameter& param : params_) {
    if (!param.view.defined()) continue;
    if (param.view.storage().use_count() > 1) return true;
    views.push_back(param.view);
  }
  return are_held_ && are_held_(views);
}

void Reducer::rebuild_in_order() {
  is_rebuilt_ = true;
  // The last hook of each counts, and what never fired comes last.
  std::vector<int64_t> order;
  std::vector<bool> seen(params_.size(), false);
  const auto add = [&](int64_t index) {
    if (!seen[index]) order.push_back(index);
    seen[index] = true;
  };
  for (size_t i = fired_.size(); i > 0; --i) add(fired_[i - 1]);
  std::reverse(order.begin(), order.end());
  for (int64_t index : registration_order()) add(index);
  at::Tensor holders = at::zeros({1}, at::kLong).fill_(are_views_held() ? 1 : 0).to(params_[0].tensor.device());
  sum_now(holders, "the number of ranks that hold gradients");
  fired_ = from_rank_0(order, kOrder);
  is_measuring_ = options_.plan_from_measurement && arena_bytes_ > 0;
  if (is_measuring_) ready_.assign(kMeasuredSteps * params_.size(), 0);
  measured_from_ = steps_;
  const std::vector<BucketPlan> plans = plan(fired_);
  check_same_everywhere(plans);
  if (is_in_place(plans) || holders.cpu().data_ptr<int64_t>()[0] > 0) return;
  const std::vector<at::Tensor> kept = copy_kept_gradients();
  build_arena(plans);
  put_back(kept);
}

// Ranks may have seen or computed other values: all take rank 0's.
std::vector<int64_t> Reducer::from_rank_0(const std::vector<int64_t>& values,
                                          const std::shared_ptr<const std::string>& what) {
  const at::Tensor shared = at::tensor(values, at::kLong).to(params_[0].tensor.device());
  try {
    const Progress::Wait wait(*progress_, what, Progress::kGradients);
    comm_->broadcast(shared);
  } catch (const std::exception& error) {
    fail_collective(*what, error.what());
  }
  const at::Tensor on_host = shared.cpu();
  return {on_host.data_ptr<int64_t>(), on_host.data_ptr<int64_t>() + on_host.numel()};
}

// Before anything is put where only this rank would look for it. They may differ where the parameters do, which only
// init_sync=True would have found.
void Reducer::check_same_everywhere(const std::vector<BucketPlan>& plans) {
  const auto all = gather_over_ranks({static_cast<double>(hash_of(plans))}, "the buckets' checksums");
  for (int rank = 1; rank < comm_->size(); ++rank) {
    if (all[rank].data_ptr<double>()[0] == all[0].data_ptr<double>()[0]) continue;
    throw EnvironmentError(text("ranks 0 and ", rank,
                                " make different buckets of the same plan: their parameters differ in number, size, "
                                "dtype or order. Build the same model on every rank; with init_sync=True "
                                "DistributedDataParallel says where they differ."));
  }
}

// Whether the arena has these buckets already.
bool Reducer::is_in_place(const std::vector<BucketPlan>& plans) const {
  const auto same_slots = [](const BucketPlan& a, const BucketPlan& b) {
    return std::equal(a.slots.begin(), a.slots.end(), b.slots.begin(), b.slots.end(),
                      [](const Slot& x, const Slot& y) { return x.param == y.param; });
  };
  return std::equal(plans.begin(), plans.end(), plans_.begin(), plans_.end(), same_slots);
}

// Gradients that are being accumulated move with their parameters: those in the arena, whatever tensor shows them.
std::vector<at::Tensor> Reducer::copy_kept_gradients() const {
  std::vector<at::Tensor> kept(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& grad = params_[i].tensor.grad();
    if (grad.defined() && !params_[i].sparse && lies_in_arena(grad)) kept[i] = grad.clone();
  }
  return kept;
}

void Reducer::put_back(const std::vector<at::Tensor>& kept) {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!kept[i].defined()) continue;
    params_[i].view.copy_(kept[i]);
    params_[i].tensor.mutable_grad() = params_[i].view;
  }
}

// ---- The plan from measurement.

// An index into kObstacles.
int64_t Reducer::obstacle_to_planning() const {
  if (comm_hook_) return 1;
  if (was_joining_) return 2;
  return are_views_held() ? 3 : 0;
}

// Waits for the sum over ranks, where the step's first gradient has come.
void Reducer::sum_now(const at::Tensor& flat, const std::string& what) {
  try {
    const Progress::Wait wait(*progress_, std::make_shared<const std::string>(what), Progress::kGradients);
    comm_->start_sum(flat)->wait();
  } catch (const std::exception& error) {
    fail_collective("the all-reduce of " + what, error.what());
  }
}

// Every rank's values, by rank.
std::vector<at::Tensor> Reducer::gather_over_ranks(const std::vector<double>& values, const std::string& what) {
  const int64_t count = static_cast<int64_t>(values.size());
  const at::Tensor all = at::zeros({comm_->size() * count}, at::kDouble);
  std::copy(values.begin(), values.end(), all.data_ptr<double>() + comm_->rank() * count);
  sum_now(all, what);
  return all.view({comm_->size(), count}).unbind();
}

// Seconds of an all-reduce of so many bytes, in the arena; destroys what lies there.
std::vector<double> Reducer::time_all_reduces(const std::vector<int64_t>& sizes) {
  const at::Tensor arena = arenas_.begin()->second;
  std::vector<double> seconds;
  arena.narrow(0, 0, sizes.back()).zero_();  // nothing that is slow to add, such as subnormal numbers
  for (int64_t bytes : sizes) {
    const int64_t numel = bytes / static_cast<int64_t>(sizeof(float));
    const at::Tensor flat = piece_of(arena, 0, {numel}, {1}, at::kFloat);
    std::vector<double> times;
    for (int probe = -1; probe < kProbes; ++probe) {  // the first lets the ranks meet
      int64_t duration = 0;
      {
        const Stopwatch stopwatch(duration);
        sum_now(flat, "a probe that is timed");
      }
      if (probe >= 0) times.push_back(1e-9 * static_cast<double>(duration));
    }
    seconds.push_back(median(times));
  }
  return seconds;
}

// From what all have measured: a gradient is there when the last rank has it, and an all-reduce takes as long as on the
// slowest.
void Reducer::rebuild_from_measurement() {
  is_measuring_ = false;
  const size_t count = params_.size();
  std::vector<double> mine = {static_cast<double>(obstacle_to_planning())};
  for (size_t i = 0; i < count; ++i) {
    std::vector<double> steps;
    for (int64_t step = 0; step < kMeasuredSteps; ++step) steps.push_back(ready_[step * count + i]);
    mine.push_back(median(steps));
  }
  ready_ = {};
  std::vector<double> ready(count, 0);
  const std::vector<at::Tensor> all_ready = gather_over_ranks(mine, "the gradients' times");
  for (int rank = 0; rank < comm_->size(); ++rank) {
    const double* values = all_ready[rank].data_ptr<double>();
    if (values[0] != 0) plan_report_.why_not = text("on rank ", rank, " ", kObstacles[static_cast<int64_t>(values[0])]);
    for (size_t i = 0; i < count; ++i) ready[i] = std::max(ready[i], values[1 + i]);
  }
  if (!plan_report_.why_not.empty()) return;

  std::vector<int64_t> sizes;
  const int64_t largest = arenas_.begin()->second.numel() / kAlignment * kAlignment;
  for (int64_t bytes : kProbeBytes) sizes.push_back(std::min(bytes, largest));
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  const std::vector<at::Tensor> kept = copy_kept_gradients();
  const std::vector<at::Tensor> all_seconds = gather_over_ranks(time_all_reduces(sizes), "the all-reduces' times");
  Costs costs{{}, comm_->in_background()};
  for (size_t i = 0; i < sizes.size(); ++i) {
    double slowest = i == 0 ? 0 : costs.points.back().seconds;
    for (const at::Tensor& seconds : all_seconds) slowest = std::max(slowest, seconds.data_ptr<double>()[i]);
    costs.points.push_back({sizes[i], slowest});
  }
  // Floating point decides: processors that differ might decide otherwise.
  std::vector<int64_t> cuts(count, 0);
  if (comm_->rank() == 0) {
    const std::vector<bool> chosen = choose_cuts(param_sizes(), fired_, ready, costs);
    std::copy(chosen.begin(), chosen.end(), cuts.begin());
  }
  cuts = from_rank_0(cuts, kCuts);
  const std::vector<BucketPlan> plans = cut_buckets(param_sizes(), fired_, std::vector<bool>(cuts.begin(), cuts.end()));
  check_same_everywhere(plans);
  if (!is_in_place(plans)) build_arena(plans);
  put_back(kept);
  plan_report_.expected = expect(plans, ready, costs);
  plan_report_.costs = std::move(costs);
}

Reducer::PlanReport Reducer::plan_report() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return plan_report_;
}

bool Reducer::lies_in_arena(const at::Tensor& tensor) const {
  const char* place = static_cast<const char*>(tensor.const_data_ptr());
  for (const auto& [device, arena] : arenas_) {
    const char* begin = static_cast<const char*>(arena.const_data_ptr());
    if (tensor.device() == arena.device() && place >= begin && place < begin + arena.numel()) return true;
  }
  return false;
}

bool Reducer::has_rebuilt_buckets() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return is_rebuilt_;
}

at::Tensor Reducer::view_of(const Parameter& param) const {
  return piece_of(buckets_[param.bucket].flat, param.offset, param.tensor.sizes(), grad_strides(param.tensor),
                  grad_dtype(param));
}

void Reducer::add_hooks() {
  for (size_t i = 0; i < params_.size(); ++i) {
    Parameter& param = params_[i];
    auto accumulator = torch::autograd::impl::grad_accumulator(param.tensor);
    // Weak: a graph may outlive the wrapper.
    auto hook = [weak = weak_from_this(), i](const torch::autograd::variable_list& outputs,
                                             const torch::autograd::variable_list& inputs) {
      if (const auto self = weak.lock()) self->on_gradient(i, inputs.empty() || inputs[0].defined());
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
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (Parameter& param : params_) {
    if (param.accumulator) param.accumulator->del_post_hook(param.hook);
    param.accumulator.reset();
  }
  reset();
}

// ---- Settings.

// Runs a public operation and keeps the text of what it throws.
template <class Body>
auto Reducer::noting_errors(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const c10::Error& error) {
    error_ = error.what_without_backtrace();
    throw;
  } catch (const std::exception& error) {
    error_ = error.what();
    throw;
  }
}

void Reducer::begin_weighted(double weight) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (optimizer_in_backward_ || low_precision_) {
    throw UnsupportedError(
        "backward(loss, weight=...) does not go together with optimizers that run inside backward, nor with DDP's "
        "mixed_precision: both use gradients before the sum of weights is known.");
  }
  bool is_clean = true, is_untouched = true;
  for (const Parameter& param : params_) {
    const at::Tensor& grad = param.tensor.grad();
    is_clean = is_clean && (!grad.defined() || grad.count_nonzero().item<int64_t>() == 0);
    is_untouched = is_untouched && param.weighted == seen_grad(param);
  }
  // Gradients were zeroed, and with them what their weights counted; not those that a backward left at zero.
  if (is_clean && !is_untouched) weight_.reset();
  if (!is_clean && !weight_) {
    throw UserError(
        "backward(loss, weight=...) found gradients that no weight counts: those of an earlier synchronised backward, "
        "of a backward without weight, or of one that raised. Call optimizer.zero_grad() first.");
  }
  weight_ = weight_.value_or(0) + weight;
  is_weighted_ = true;
}

void Reducer::end_weighted(bool failed) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  is_weighted_ = false;
  if (failed) weight_.reset();
  for (Parameter& param : params_) param.weighted = seen_grad(param);
}

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
  arenas_.clear();
  is_rebuilt_ = is_measuring_ = was_joining_ = false;
  fired_.clear();
  build_arena(plan(registration_order()));
}

void Reducer::reset_state() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  drain();  // other ranks may be adding up what lies in the arena
  forget_step();
  local_used_.zero_();
}

void Reducer::add_end_callback(std::function<void()> callback) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  end_callbacks_.push_back(std::move(callback));
}

// ---- Several wrappers around one parameter.

// False: another wrapper reduces it in this backward.
bool Reducer::claim(const Parameter& param) const {
  if (num_reducers == 1) return true;
  const std::lock_guard<std::mutex> lock(shared_mutex);
  const int backward = torch::autograd::get_current_graph_task_id();
  const Taker taker = takers.emplace(param.tensor.unsafeGetTensorImpl(), Taker{this, backward}).first->second;
  if (taker.reducer == this) return true;
  if (taker.backward == backward) return false;
  throw_unsupported(text("parameter '", param.name,
                         "' belongs to two DistributedDataParallel wrappers, and the other one has a backward under "
                         "way that has not ended (it was interrupted by an error, or it is a reentrant one): wrap it "
                         "once, or use one of the wrappers under no_sync()."));
}

bool Reducer::is_wanted_elsewhere(const Parameter& param) const {
  if (num_reducers == 1) return false;
  const std::lock_guard<std::mutex> lock(shared_mutex);
  const auto found = wanted.find(param.tensor.unsafeGetTensorImpl());
  return found != wanted.end() && found->second > 0;  // this reducer is idle, so that none of them is its own
}

void Reducer::release_params() {
  const std::lock_guard<std::mutex> lock(shared_mutex);
  for (const Parameter& param : params_) {
    const c10::TensorImpl* key = param.tensor.unsafeGetTensorImpl();
    if (is_wanted_) {
      if (const auto found = wanted.find(key); found != wanted.end() && --found->second == 0) wanted.erase(found);
    }
    if (takers.empty()) continue;
    if (const auto found = takers.find(key); found != takers.end() && found->second.reducer == this)
      takers.erase(found);
  }
  is_wanted_ = false;
}

// ---- A step's beginning.

void Reducer::reset() {
  release_params();
  for (Parameter& param : params_) {
    param.ready = param.without_grad = param.delegated = false;
    param.untouched = param.differentiable = at::Tensor();
    param.fired = 0;
  }
  for (Bucket& bucket : buckets_) {
    bucket.missing = bucket.params.size();
    bucket.phase = Phase::kFilling;
    bucket.hooked = nullptr;
    bucket.reduce.reset();
    if (bucket.sparse) bucket.flat = at::Tensor();
  }
  next_bucket_ = 0;
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
  now_ = Times{clock_ns()};
  progress_->move_to(steps_ + 1, Progress::kForward);
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  noting_errors([&] { prepare(outputs); });
}

void Reducer::prepare(const std::vector<at::Tensor>& outputs) {
  if (step_ == Step::kRunning) end_interrupted_step();
  if (!low_precision_) {
    for (const Parameter& param : params_) check_hooked(param);
  }
  check_frozen();
  reset();
  began_ = true;
  ++forwards_;
  for (Parameter& param : params_) param.version = param.tensor._version();
  if (num_reducers > 1) {
    const std::lock_guard<std::mutex> shared_lock(shared_mutex);
    for (const Parameter& param : params_) ++wanted[param.tensor.unsafeGetTensorImpl()];
    is_wanted_ = true;
  }
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

void Reducer::check_frozen() const {
  for (const auto& [name, tensor] : options_.frozen) {
    if (!tensor.requires_grad()) continue;
    throw EnvironmentError(text("parameter '", name,
                                "' was frozen when DistributedDataParallel wrapped the module and requires a gradient "
                                "now, which would not be reduced: set requires_grad before wrapping, or wrap the "
                                "module anew after unfreezing."));
  }
}

// One gradient has been accumulated into parameter `index`'s .grad (came), or is known to be none.
void Reducer::on_gradient(size_t index, bool came) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  noting_errors([&] { handle_gradient(index, came); });
}

void Reducer::handle_gradient(size_t index, bool came) {
  Parameter& param = params_[index];
  if (weight_ && !is_weighted_) {
    throw_value_error(
        "this backward has no weight, but the gradients that it adds to were given with backward(loss, weight=...): "
        "give every backward of an accumulation a weight, or call optimizer.zero_grad() first.");
  }
  auto rpc_context = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
  const bool has_grad = rpc_context ? came : param.tensor.grad().defined();
  if (has_grad) local_used_.data_ptr<int32_t>()[index] = 1;
  if (step_ == Step::kIdle) {
    if (!sync_ || is_wanted_elsewhere(param)) {
      if (has_grad && !param.sparse && !rpc_context) take_gradient(param, 1);
      return;
    }
    begin_unprepared_backward();
  }
  rpc_context_ = std::move(rpc_context);
  if (step_ == Step::kPrepared) begin_backward();
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
  start_full_buckets();
}

void Reducer::begin_backward() {
  began_ = true;
  progress_->move_to(steps_ + 1, Progress::kGradients);
  rebuild_buckets();
  step_ = Step::kRunning;
  if (steps_ == 0) fired_.clear();
  now_.buckets_reduced = 0;
  now_.exposed = 0;
  now_.backward_start = clock_ns();
  // After several forwards the first of several backwards may leave out what the others use.
  if (forwards_ > 1 && options_.find_unused_parameters) end_unprepared_backward();
  scaling_ = Scaling{};
  if (weight_) {
    weight_sum_ = at::zeros({1}, at::TensorOptions(at::kDouble));
    weight_sum_.data_ptr<double>()[0] = *weight_;
    weight_sum_ = weight_sum_.to(params_[0].tensor.device());
  } else if (divisor_ > 0 && divisor_ != comm_->size()) {
    scaling_.before = 1.0 / static_cast<double>(divisor_);
  } else if (comm_->averages()) {
    scaling_.as_sum = false;
  } else {
    scaling_.before = 1.0 / comm_->size();
  }
  if (comm_hook_) scaling_.before = 1;  // a hook gets sums, and divides
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

// A gradient came that no forward of the wrapper announced: a second backward after the first was reduced, a forward
// under no_sync() whose backward is not, or the inner module was called. What is in .grad is then reduced as it is.
void Reducer::begin_unprepared_backward() {
  reset();
  for (Parameter& param : params_) param.version = param.tensor._version();
  begin_backward();
  end_unprepared_backward();
}

// Asks for a look at what is missing when this backward ends.
void Reducer::end_unprepared_backward() {
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
    self->noting_errors([&] {
      if (!self->options_.find_unused_parameters) self->fail_incomplete();
      self->mark_rest_unused();
    });
  });
}

void Reducer::mark_rest_unused() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].ready) continue;
    params_[i].without_grad = params_[i].fired == 0 || !(rpc_context_ || params_[i].tensor.grad().defined());
    mark_ready(i);
  }
  start_full_buckets();
}

void Reducer::delay_all_reduce() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  if (graph_ != Graph::kStaticUnknown || step_ == Step::kIdle) return;  // a backward that does not synchronise
  if (step_ == Step::kPrepared) begin_backward();
  for (Parameter& param : params_) param.expected = param.fired;
  noting_errors([&] { mark_rest_unused(); });
}

// ---- Gradients.

void Reducer::check_gradient(const Parameter& param, const at::Tensor& grad) const {
  const at::Tensor& tensor = param.tensor;
  if (param.sparse != (grad.layout() == at::kSparse) || (grad.layout() != at::kStrided && !param.sparse)) {
    throw_type_error(text("the gradient of parameter '", param.name, "' is ", grad.layout(), ", expected ",
                          param.sparse ? "Sparse (its Embedding has sparse=True)" : "Strided",
                          ": set sparse the same in every Embedding that shares the parameter, and to True only where "
                          "nothing else uses it."));
  }
  if (grad.scalar_type() != grad_dtype(param) || grad.device() != tensor.device() ||
      !grad.sizes().equals(tensor.sizes())) {
    throw_type_error(text("the gradient of parameter '", param.name, "' is ", grad.scalar_type(), " ", grad.sizes(),
                          " on ", grad.device().str(), ", expected ", grad_dtype(param), " ", tensor.sizes(), " on ",
                          tensor.device().str(),
                          ": do not assign .grad or set grad_dtype to another type under "
                          "DistributedDataParallel."));
  }
}

// A hook that runs before ours may have stepped the parameter with this rank's own gradient: the replicas would part.
void Reducer::check_unconsumed(const Parameter& param, bool came) const {
  if (low_precision_ || optimizer_in_backward_ || comm_->size() == 1 || rpc_context_) return;
  const bool taken = came && !param.tensor.grad().defined();
  if (!taken && param.tensor._version() == param.version) return;
  throw EnvironmentError(text(
      "parameter '", param.name, taken ? "' lost its gradient" : "' was changed",
      " during backward, before its gradient was reduced over ranks: a hook (register_post_accumulate_grad_hook, an "
      "optimizer fused into backward) used this rank's own gradient, and the replicas would part. Step after backward, "
      "use torch.distributed.optim._apply_optimizer_in_backward before wrapping, or a communication hook."));
}

// One pass from `values` to the parameter's place in the arena.
void Reducer::fill_view(Parameter& param, const at::Tensor& values, double scale) const {
  const void* place = static_cast<char*>(buckets_[param.bucket].flat.data_ptr()) + param.offset;
  // Someone may have assigned to .grad.data, and with that to our view: give out a new one.
  if (param.view.data_ptr() != place && param.view.numel() > 0) param.view = view_of(param);
  if (scale != 1) {
    at::mul_out(param.view, values, as_scalar(scale));
  } else {
    param.view.copy_(values);
  }
}

// Lets `body` read and replace the gradient that this backward accumulates into. The context's entry is written back.
template <class Body>
void Reducer::with_grad(Parameter& param, Body&& body) {
  if (!rpc_context_) {
    body(param.tensor.mutable_grad());
    return;
  }
  rpc_context_->runGradCallbackForVariable(param.tensor, [&](at::Tensor& grad) {
    body(grad);
    return true;
  });
}

// Moves the gradient to its place in the arena, scaled for the sum over ranks, and lets .grad be that place.
void Reducer::take_gradient(Parameter& param, double scale) {
  with_grad(param, [&](at::Tensor& grad) { move_gradient(param, grad, scale); });
}

void Reducer::move_gradient(Parameter& param, at::Tensor& grad, double scale) {
  check_gradient(param, grad);
  if (param.sparse) {
    // A tensor of its own: autograd lets sparse gradients of several parameters share their values.
    grad = scale != 1 ? grad.mul(as_scalar(scale)) : grad.clone();
    return;
  }
  if (grad.requires_grad()) {
    TORCH_WARN_ONCE(
        "DistributedDataParallel and backward with create_graph=True: the gradients' values are reduced over ranks, "
        "the gradients of those gradients are not (as with torch's class).");
    fill_view(param, grad.detach(), scale);
    param.differentiable = grad;
    return;
  }
  const void* place = static_cast<char*>(buckets_[param.bucket].flat.data_ptr()) + param.offset;
  if (grad.data_ptr() == place && grad.strides().equals(param.view.strides())) {
    if (scale != 1) grad.mul_(as_scalar(scale));
    return;
  }
  fill_view(param, grad, scale);
  grad = param.view;
}

void Reducer::mark_ready(size_t index) {
  Parameter& param = params_[index];
  if (param.ready) {
    throw EnvironmentError(text(
        "Expected to mark a variable ready only once, but parameter '", param.name,
        "' got a second gradient in the same synchronised backward. Either it is used in several reentrant backward "
        "passes (torch.utils.checkpoint with use_reentrant=True: pass use_reentrant=False, or static_graph=True to "
        "DistributedDataParallel), or it is used outside the wrapped module's forward (call the wrapper, not its "
        ".module), or backward ran twice after one forward."));
  }
  param.ready = true;
  param.delegated = !claim(param);
  Bucket& bucket = buckets_[param.bucket];
  double scale = scaling_.before;
  // Sparse gradients are always summed.
  if (param.sparse && !comm_hook_ && !weight_) scale = 1.0 / (divisor_ > 0 ? divisor_ : comm_->size());
  if (param.delegated && !param.sparse) {
    param.view.zero_();
  } else if (!param.without_grad) {
    take_gradient(param, scale);
    if (param.sparse) with_grad(param, [&](at::Tensor& grad) { bucket.flat = grad; });
  } else if (const at::Tensor& kept = param.tensor.grad(); kept.defined() && !rpc_context_) {
    // Other ranks may have used it: then this rank's share is what it has kept so far.
    check_gradient(param, kept);
    param.untouched = kept.clone();
    if (param.sparse) {
      bucket.flat = kept.clone().mul_(as_scalar(scale));
    } else {
      fill_view(param, param.untouched, scale);
    }
  } else if (param.sparse) {
    bucket.flat = no_rows(param.tensor);
  } else {
    param.view.zero_();
  }
  DT_INVARIANT(bucket.missing > 0);
  if (--bucket.missing == 0) bucket.phase = Phase::kFull;
}

// ---- Buckets.

// Starts buckets strictly in plan order, so that every rank issues the same collectives in the same order.
void Reducer::start_full_buckets() {
  if (next_bucket_ == buckets_.size()) return;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].phase == Phase::kFull) {
    if (next_bucket_ == 0) now_.comm_start = clock_ns();
    start(buckets_[next_bucket_]);
    ++next_bucket_;
  }
  if (next_bucket_ < buckets_.size()) return;
  now_.backward_end = clock_ns();
  const at::Device device = params_[0].tensor.device();
  if (shares_used_map()) {
    global_used_ = local_used_.to(device, /*non_blocking=*/false, /*copy=*/true);
    used_reduce_ = comm_->start_sum(global_used_);
  }
  if (weight_) weight_reduce_ = comm_->start_sum(weight_sum_);
  if (options_.check_replicas_every > 0 && !is_joining_ && (steps_ + 1) % options_.check_replicas_every == 0) {
    std::vector<at::Tensor> tensors;
    for (const Parameter& param : params_) tensors.push_back(param.tensor);
    replica_hashes_ = at::zeros({comm_->size()}, at::kLong);
    replica_hashes_.data_ptr<int64_t>()[comm_->rank()] = hash_of(tensors);
    replica_hashes_ = replica_hashes_.to(device);
    replica_reduce_ = comm_->start_sum(replica_hashes_);
  }
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

void Reducer::fail_start(const std::string& what, const std::exception& error) {
  const std::string report = error.what();  // it may go with the step
  forget_step();
  fail_collective("the all-reduce of " + what, report);
}

void Reducer::reduce(Bucket& bucket) {
  RECORD_FUNCTION("drivetrain::all_reduce", std::vector<c10::IValue>());
  ++now_.buckets_reduced;
  const size_t index = &bucket - buckets_.data();
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
    const at::Tensor flat = as_real(bucket.flat);
    try {
      bucket.reduce = as_sum ? comm_->start_sum(flat) : comm_->start(flat);
    } catch (const std::exception& error) {
      fail_start(*bucket.label, error);
    }
  }
}

std::unique_ptr<PendingReduce> Reducer::reduce_zeros(size_t index, bool as_sum) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  Bucket& bucket = buckets_.at(index);
  const Parameter& first = params_[bucket.params[0]];
  if (bucket.sparse) {
    bucket.flat = no_rows(first.tensor);
  } else {
    bucket.flat.zero_();
  }
  scaling_ = Scaling{1, as_sum || !comm_->averages()};
  start(bucket);
  return std::move(bucket.reduce);
}

void Reducer::wait_for_zeros(size_t index, PendingReduce& reduce) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  noting_errors([&] { wait_for(reduce, buckets_.at(index).label, place_of(index)); });
}

// The same on all ranks, although one that has run out of inputs has not seen a static graph.
bool Reducer::shares_used_map() const {
  return graph_ == Graph::kDynamic ? options_.find_unused_parameters : steps_ == 0;
}

void Reducer::shadow_used_map() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!shares_used_map()) return;
  at::Tensor used = at::zeros_like(local_used_, params_[0].tensor.device());
  wait_for(*comm_->start_sum(used), kUsedMap, place_of_all());
  if (graph_ == Graph::kDynamic) return;
  used = used.cpu();
  for (size_t i = 0; i < params_.size(); ++i) params_[i].used_somewhere = used.data_ptr<int32_t>()[i] > 0;
}

void Reducer::count_shadowed_step() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  was_joining_ = was_joining_ || is_measuring_;
  ++steps_;
  reset();
}

// ---- A step's end.

// Also for parameters that had a gradient: another hook may have re-pointed .grad since (that of a second wrapper
// around the same parameter does).
void Reducer::finish_param(Parameter& param, bool used_somewhere) {
  if (param.delegated) return;
  if (!used_somewhere) {
    if (param.untouched.defined()) param.tensor.mutable_grad().copy_(param.untouched);
    return;
  }
  if (rpc_context_ && param.without_grad) {
    forget_step();
    throw_unsupported(text("parameter '", param.name,
                           "' got a gradient on other ranks and none on this one: a context of distributed autograd "
                           "(torch.distributed.autograd) has no place for it. Use every parameter on every rank."));
  }
  if (param.differentiable.defined()) {
    param.differentiable.detach().copy_(param.view);
    param.tensor.mutable_grad() = param.differentiable;
    return;
  }
  const at::Tensor& result = param.sparse ? buckets_[param.bucket].flat : param.view;
  with_grad(param, [&](at::Tensor& grad) {
    if (!grad.is_same(result)) grad = result;
  });
}

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
      grad.copy_(piece.as_strided(param.tensor.sizes(), grad_strides(param.tensor), piece.storage_offset()));
      param.differentiable = at::Tensor();
    }
    return;
  }
  if (bucket.sparse || !result.is_alias_of(bucket.flat) || result.scalar_type() != bucket.flat.scalar_type()) {
    bucket.flat.copy_(bucket.sparse ? result : result.reshape({-1}));
  }
}

void Reducer::wait_for_buckets() {
  RECORD_FUNCTION("drivetrain::wait_for_all_reduces", std::vector<c10::IValue>());
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const Bucket& bucket = buckets_[i];
    if (bucket.reduce) wait_for(*bucket.reduce, bucket.label, place_of(i));
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
    if (!reduce) return;
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
  divisor_ = 0;
  forwards_ = 0;
  is_joining_ = false;
  end_callbacks_.clear();
}

void Reducer::fail_collective(const std::string& what, const std::string& report) const {
  const std::string hang = progress_->report(steps_ + 1);
  throw EnvironmentError(text("drivetrain: ", what, " failed in synchronised step ", steps_ + 1,
                              num_reducers > 1 ? " of " + options_.wrapper : "",
                              "; a rank has probably died, hangs or has left out a step: look for the first error in "
                              "the others' logs, and whether they name the same step. The transport reports: ",
                              report, hang.empty() ? "" : "\nThe last report before that: ", hang));
}

void Reducer::finalize_backward() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::NoGradGuard no_grad_tracking;
  noting_errors([&] { finalize(); });
}

void Reducer::finalize() {
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
    for (Bucket& bucket : buckets_) finish_bucket(bucket);
  } catch (...) {
    forget_step();
    throw;
  }
  if (weight_) {
    const double total = weight_sum_.cpu().data_ptr<double>()[0];
    if (!(total > 0)) {
      forget_step();
      throw_value_error(text("the weights given to backward(loss, weight=...) sum to ", total,
                             " over all ranks, expected a sum above 0."));
    }
    // A hook has divided by the number of ranks already.
    const double scale = (comm_hook_ ? comm_->size() : 1) / total;
    for (Bucket& bucket : buckets_) bucket.flat.mul_(as_scalar(scale));
  }
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
    if (!optimizer_in_backward_ && !low_precision_) finish_param(param, used_somewhere);
  }
  if (graph_ == Graph::kStaticUnknown) graph_ = Graph::kStaticKnown;
  local_used_.zero_();
  weight_.reset();
  divisor_ = 0;
  forwards_ = 0;
  was_joining_ = was_joining_ || (is_joining_ && is_measuring_);
  is_joining_ = false;
  progress_->end_step();
  const bool compare = replica_reduce_ != nullptr;
  std::vector<std::function<void()>> callbacks = std::move(end_callbacks_);
  end_callbacks_.clear();
  reset();
  for (const auto& callback : callbacks) callback();
  if (compare) compare_replicas();
}

// Names the first parameter that is not the same everywhere.
void Reducer::compare_replicas() {
  const int64_t ranks = comm_->size(), count = static_cast<int64_t>(params_.size());
  const at::Tensor hashes = replica_hashes_.cpu();
  const auto differs = [&](const int64_t* values, int64_t stride) {
    for (int64_t r = 1; r < ranks; ++r) {
      if (values[r * stride] != values[0]) return true;
    }
    return false;
  };
  if (!differs(hashes.data_ptr<int64_t>(), 1)) return;
  at::Tensor each = at::zeros({ranks, count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    each.data_ptr<int64_t>()[comm_->rank() * count + i] = hash_of({params_[i].tensor});
  }
  each = each.to(params_[0].tensor.device());
  wait_for(*comm_->start_sum(each), kParameters, place_of_all());
  each = each.cpu();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* values = each.data_ptr<int64_t>() + i;
    if (!differs(values, count)) continue;
    std::map<int64_t, std::vector<std::string>> groups;
    for (int64_t r = 0; r < ranks; ++r) groups[values[r * count]].push_back(std::to_string(r));
    std::string who;
    for (const auto& [hash, members] : groups) who += (who.empty() ? "ranks {" : ", {") + joined(members) + "}";
    throw EnvironmentError(text(
        "replicas have parted: parameter '", params_[i].name, "' is not the same on all ranks (equal within ", who,
        "), seen in synchronised step ", steps_,
        ". Something changed it on some ranks only: a step that not all ranks made, another optimizer state, a loaded "
        "checkpoint, or code that writes to parameters with rank-dependent values."));
  }
}

// ---- Messages.

std::string Reducer::describe(const Bucket& bucket) const {
  std::vector<std::string> names;
  for (size_t index : bucket.params) names.push_back(params_[index].name);
  return text("bucket ", &bucket - buckets_.data(), " of ", buckets_.size(), " [", joined(names), "]");
}

// Says what torch's reducer says where others look for it, and always gives the names.
void Reducer::fail_incomplete() const {
  std::string names, indices;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].ready) continue;
    names += (names.empty() ? "" : ", ") + params_[i].name;
    indices += text(indices.empty() ? "" : " ", i);
  }
  std::string cause;
  if (graph_ == Graph::kStaticKnown) {
    cause =
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in "
        "first iteration, but then got unused in the second iteration. this is not compatible with static_graph set to "
        "True.";
  } else {
    cause =
        "Some parameters got no gradient although backward was to be reduced over ranks. If a forward may leave "
        "parameters unused, say so by passing the keyword argument `find_unused_parameters=True` to "
        "DistributedDataParallel; make sure that all `forward` function outputs participate in calculating loss, and "
        "that forward goes through the wrapper, not its .module. An exception in the middle of that backward has the "
        "same "
        "effect, on every rank that it interrupts.";
    if (options_.find_unused_parameters) {
      cause +=
          " Since `find_unused_parameters=True` is enabled, some output that reaches them is probably not in the "
          "outputs that `forward` returned (which may hold tensors in lists, tuples, dicts and dataclasses).";
    }
  }
  throw EnvironmentError(
      text("Expected to have finished reduction in the prior iteration before starting a new one. ", cause,
           "\nParameter indices which did not receive grad for rank ", comm_->rank(), ": ", indices,
           "\nParameters which did not receive grad for rank ", comm_->rank(), ": ", names,
           "\n(For torch's own log of the step, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
           "DETAIL.)"));
}

void Reducer::fail_changed_graph(const Parameter& param) const {
  throw EnvironmentError(text(
      "Your training graph has changed in this iteration, which static_graph=True does not allow: parameter '",
      param.name, "' got ", param.fired, param.fired == 1 ? " gradient" : " gradients", ", expected ", param.expected,
      " as in the first iteration. Leave static_graph out, or pass find_unused_parameters=True instead."));
}

void Reducer::check_finalized() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  noting_errors([&] {
    if (step_ == Step::kRunning) fail_incomplete();
  });
}

std::vector<Reducer::BucketInfo> Reducer::buckets() const {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<BucketInfo> infos;
  for (const Bucket& bucket : buckets_) {
    BucketInfo info;
    for (size_t index : bucket.params) info.names.push_back(params_[index].name);
    for (size_t index : bucket.params) {
      info.bytes += params_[index].tensor.numel() * static_cast<int64_t>(c10::elementSize(grad_dtype(params_[index])));
    }
    info.dtype = c10::toString(grad_dtype(params_[bucket.params[0]]));
    infos.push_back(std::move(info));
  }
  return infos;
}

Reducer::Times Reducer::times() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return last_;
}

bool Reducer::is_graph_static() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return is_graph_static_;
}

std::string Reducer::last_error() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return error_;
}

at::Tensor Reducer::used_map() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return (global_used_.defined() ? global_used_ : local_used_)
      .to(params_[0].tensor.device(), /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace drivetrain::ddp
