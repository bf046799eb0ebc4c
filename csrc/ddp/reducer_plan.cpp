// The reducer's arena, and its buckets' plan: at first by size, then by the order and the times of gradients.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/torch_text.h"
#include "base/transfer.h"
#include "ddp/reducer.h"

namespace drivetrain::ddp {
namespace {

// Timed once for the plan, each as often as it takes for a median.
constexpr int64_t kProbeBytes[] = {64 << 10, 1 << 20, 4 << 20, 16 << 20};
constexpr int kProbes = 5;

// Why a plan from measurement is not made; numbers, so that ranks can tell each other.
constexpr const char* kObstacles[] = {
    "",
    "a communication hook reduces",
    "a rank ran out of inputs, or no forward prepared a backward, in the steps that were to be measured",
    "the script keeps references to .grad tensors, which must go on showing their parameters' gradients",
};
// A bucket below it costs a collective's latency whatever its size; not tuned.
constexpr int64_t kSmallBucket = 256 << 10;

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

// What is waited for, beside sums.
const auto kOrder = std::make_shared<const std::string>("the broadcast of the buckets' order");
const auto kCuts = std::make_shared<const std::string>("the broadcast of the buckets' sizes");

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

at::ScalarType Reducer::grad_dtype(const Parameter& param) const {
  return low_precision_ && param.tensor.is_floating_point() ? *low_precision_ : param.grad_dtype;
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
  wants_tags_ = comm_->wants_tags();  // allocate() may end that
  std::map<std::string, int64_t> bytes, largest;
  for (const BucketPlan& plan : plans) {
    if (is_sparse(plan)) continue;
    const std::string device = device_of(plan).str();
    const int64_t with_tags = plan.bytes + tag_bytes(plan);
    bytes[device] += with_tags;
    largest[device] = std::max(largest[device], with_tags);
  }
  buckets_.clear();
  arena_bytes_ = 0;
  tag_digits_ = at::zeros({kTagDigits * comm_->size()}, at::kFloat);
  for (auto& [device, size] : bytes) {
    // One is filled while another is reduced; small ones that are started together have room beside each other.
    if (reuses_memory_) size = std::min(size, 2 * (largest[device] + kSmallBucket));
    arena_bytes_ += size;
  }
  std::map<std::string, int64_t> used;
  for (const BucketPlan& plan : plans) {
    Bucket& bucket = buckets_.emplace_back();
    bucket.sparse = is_sparse(plan);
    if (!bucket.sparse) {
      const std::string device = device_of(plan).str();
      at::Tensor& arena = arenas_[device];
      if (!arena.defined() || arena.numel() != bytes[device]) {
        if (arena.defined()) keep_for_streams(arena);
        arena = comm_->allocate(bytes[device], device_of(plan));
      }
      const at::ScalarType dtype = grad_dtype(params_[plan.slots[0].param]);
      const int64_t numel = plan.bytes / static_cast<int64_t>(c10::elementSize(dtype));
      const int64_t with_tags = plan.bytes + tag_bytes(plan);
      if (used[device] + with_tags > bytes[device]) used[device] = 0;  // where others have been
      bucket.offset = used[device];
      bucket.end = bucket.offset + with_tags;
      bucket.flat = piece_of(arena, bucket.offset, {numel}, {1}, dtype);
      if (with_tags > plan.bytes) {
        const int64_t tags = kTagDigits * comm_->size();
        bucket.tags = piece_of(arena, bucket.offset + plan.bytes, {tags}, {1}, dtype);
        bucket.tagged = piece_of(arena, bucket.offset, {numel + tags}, {1}, dtype);
      }
      used[device] = bucket.end;
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

// On the CPU only: elsewhere the host would have to wait for what came.
int64_t Reducer::tag_bytes(const BucketPlan& plan) const {
  const Parameter& first = params_[plan.slots[0].param];
  const at::ScalarType dtype = grad_dtype(first);
  if (first.sparse || !first.tensor.is_cpu() || !at::isFloatingType(dtype) || at::isFloat8Type(dtype)) return 0;
  if (comm_->size() == 1 || !wants_tags_) return 0;
  const int64_t bytes = kTagDigits * comm_->size() * static_cast<int64_t>(c10::elementSize(dtype));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::vector<at::Tensor> Reducer::gradient_places() const {
  std::vector<at::Tensor> places;
  for (const Parameter& param : params_) places.push_back(param.view);
  return places;
}

at::Tensor Reducer::free_place(size_t index) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  Parameter& param = params_[index];
  const Bucket& bucket = buckets_[param.bucket];
  if (param.sparse || param.ready || low_precision_ || reuses_memory_ || bucket.phase != Phase::kFilling) return {};
  if (param.view.const_data_ptr() != address_of(param))
    return {};  // .grad.data was assigned to, and with that our view
  const at::NoGradGuard no_grad_tracking;
  leave_to_holders(param);
  return param.view;
}

at::Tensor Reducer::view_of(const Parameter& param) const {
  return piece_of(buckets_[param.bucket].flat, param.offset, param.tensor.sizes(), grad_strides(param.tensor),
                  grad_dtype(param));
}

bool Reducer::lies_in_arena(const at::Tensor& tensor) const {
  const char* place = static_cast<const char*>(tensor.const_data_ptr());
  for (const auto& [device, arena] : arenas_) {
    const char* begin = static_cast<const char*>(arena.const_data_ptr());
    if (tensor.device() == arena.device() && place >= begin && place < begin + arena.numel()) return true;
  }
  return false;
}

// ---- Planning anew.

// Must not depend on what only this rank knows: all communicate then.
bool Reducer::is_rebuild_due() const {
  if (steps_ == 0 || low_precision_) return false;
  if (options_.find_unused_parameters && graph_ == Graph::kDynamic) return false;
  return !is_rebuilt_ || (is_measuring_ && !reuses_memory_ && steps_ >= measured_from_ + kMeasuredSteps);
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

// Gradients that are being accumulated move with their parameters: those in the arena, whatever tensor shows them. Some
// may have been put there in this backward by a stream with which only their accumulators' streams are in order.
std::vector<at::Tensor> Reducer::copy_kept_gradients() const {
  wait_for_accumulators();
  std::vector<at::Tensor> kept(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& grad = params_[i].tensor.grad();
    if (grad.defined() && !params_[i].sparse && lies_in_arena(grad)) kept[i] = grad.clone();
  }
  return kept;
}

// The last part of a move.
void Reducer::put_back(const std::vector<at::Tensor>& kept) {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!kept[i].defined()) continue;
    params_[i].view.variable_data().copy_(kept[i]);  // no new version: it is what was there
    params_[i].tensor.mutable_grad() = params_[i].view;
  }
  let_accumulators_wait();
  if (on_moved_) on_moved_(gradient_places());
}

// Whether the arena has these buckets already.
bool Reducer::is_in_place(const std::vector<BucketPlan>& plans) const {
  const auto same_slots = [](const BucketPlan& a, const BucketPlan& b) {
    return std::equal(a.slots.begin(), a.slots.end(), b.slots.begin(), b.slots.end(),
                      [](const Slot& x, const Slot& y) { return x.param == y.param; });
  };
  return std::equal(plans.begin(), plans.end(), plans_.begin(), plans_.end(), same_slots);
}

// Ranks may have seen or computed other values: all take rank 0's.
std::vector<int64_t> Reducer::from_rank_0(const std::vector<int64_t>& values,
                                          const std::shared_ptr<const std::string>& what) {
  const at::Tensor shared = copied_to(at::tensor(values, at::kLong), params_[0].tensor.device());
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
    throw EnvironmentError(text(comm_->ranks().name(0), " and ", comm_->ranks().name(rank),
                                " make different buckets of the same plan: their parameters differ in number, size, "
                                "dtype or order. Build the same model on every rank; with init_sync=True "
                                "DistributedDataParallel says where they differ."));
  }
}

// Waits for the sum over ranks, where the step's first gradient has come.
void Reducer::sum_now(const at::Tensor& flat, const std::string& what) {
  try {
    const Progress::Wait wait(*progress_, std::make_shared<const std::string>(what), Progress::kGradients);
    start_sum(flat, Purpose::kPlan)->wait();
  } catch (const std::exception& error) {
    fail_collective("the all-reduce of " + what, error.what());
  }
}

// Every rank's values, by rank, on the host. They go over the parameters' device: a group may take no other tensors.
std::vector<at::Tensor> Reducer::gather_over_ranks(const std::vector<double>& values, const std::string& what) {
  const int64_t count = static_cast<int64_t>(values.size());
  const at::Tensor mine = at::zeros({comm_->size() * count}, at::kDouble);
  std::copy(values.begin(), values.end(), mine.data_ptr<double>() + comm_->rank() * count);
  const at::Tensor all = copied_to(mine, params_[0].tensor.device());
  sum_now(all, what);
  return all.cpu().view({comm_->size(), count}).unbind();
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
  const auto on_device = at::TensorOptions(at::kLong).device(params_[0].tensor.device());
  const at::Tensor holders = at::full({1}, are_views_held() ? 1 : 0, on_device);
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

// ---- The plan from measurement.

// An index into kObstacles.
int64_t Reducer::obstacle_to_planning() const {
  if (comm_hook_) return 1;
  if (misses_times_) return 2;
  return are_views_held() ? 3 : 0;
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
    if (values[0] != 0)
      plan_report_.why_not = text("on ", comm_->ranks().name(rank), " ", kObstacles[static_cast<int64_t>(values[0])]);
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

// ---- What is known of it.

bool Reducer::has_rebuilt_buckets() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return is_rebuilt_;
}

Reducer::PlanReport Reducer::plan_report() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return plan_report_;
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

}  // namespace drivetrain::ddp
