// Rebuilds the buckets by the order and the times of gradients.
#include "ddp/bucket_planner.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

constexpr size_t kExposedKept = 64;  // steps

// Sizes of the all-reduces that are timed once for a plan, each as often as a median needs.
constexpr int64_t kProbeBytes[] = {64 << 10, 1 << 20, 4 << 20, 16 << 20};
constexpr int kProbes = 5;

// Steps between the stages of a plan from a device's times, in which the device usually reaches what the host asks for.
constexpr int64_t kStepsToShare = 2;
constexpr int64_t kStepsToPlan = 3;
// torch's class waits for the device in its first ten steps, and then in each hundredth one.
constexpr int64_t kStepsOfTorchsWait = 100;

// Reasons why a measurement leads to no plan. Ranks tell each other the index.
enum Obstacle : int64_t { kNone, kHook, kMissedTimes, kHeldViews, kCaptured, kLate, kNumObstacles };
constexpr const char* kObstacles[] = {
    "",
    "a communication hook reduces",
    "a rank ran out of inputs, or no forward prepared a backward, in the steps that were to be measured",
    "the script keeps references to .grad tensors, which must go on showing their parameters' gradients",
    "a CUDA graph was captured in the steps that were to be measured",
    "the device was too far behind its host",  // another try follows
};
static_assert(std::size(kObstacles) == kNumObstacles);
constexpr const char* kSeveralTypes =
    "the gradients have several dtypes, so that other buckets would move them, which captured CUDA graphs forbid";

constexpr const char* kOrder = "the buckets' order";
constexpr const char* kCuts = "the buckets' sizes";
constexpr const char* kTimes = "the gradients' times";
constexpr const char* kProbe = "a probe that is timed";
constexpr double kShortest = 1e-9;  // seconds of an all-reduce

// Returns the obstacle that a rank has reported. Behind a failed collective there may be any value, and the next one
// throws.
int64_t obstacle_of(const at::Tensor& reported) {
  const double code = reported.data_ptr<double>()[0];
  return code >= 0 && code < static_cast<double>(kNumObstacles) ? static_cast<int64_t>(code) : kLate;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

BucketPlanner::BucketPlanner(const Parameters& params, GradBuffer& buffer, const StepStreams& streams,
                             Collectives& collectives, Options options)
    : params_(params), buffer_(buffer), streams_(streams), collectives_(collectives), options_(std::move(options)) {}

void BucketPlanner::start_over() {
  is_rebuilt_ = is_measuring_ = misses_times_ = has_captured_ = false;
  device_times_.reset();
  shared_times_.reset();
  fired_.clear();
  use(first_buckets());
}

void BucketPlanner::use(const std::vector<BucketPlan>& plans) {
  buffer_.build(plans, collectives_.comm());
  report_ = PlanReport();
}

void BucketPlanner::follow_torch(std::vector<int64_t> first_caps, bool is_static) {
  first_caps_ = std::move(first_caps);
  order_step_ = is_static ? 1 : 0;
  buffer_.settings.is_hooked = true;
  const std::vector<at::Tensor> kept = buffer_.copy_kept_gradients();
  use(is_rebuilt_ ? buckets_in_order() : first_buckets());
  buffer_.put_back(kept);
}

// Parameters share buckets by device and dtype. A sparse one shares with none.
std::vector<ParamSize> BucketPlanner::param_sizes() const {
  std::map<std::pair<std::string, at::ScalarType>, int64_t> groups;
  int64_t num_groups = 0;
  std::vector<ParamSize> sizes;
  for (size_t i = 0; i < params_.size(); ++i) {
    const Parameter& param = params_[i];
    const auto key = std::make_pair(param.tensor.device().str(), buffer_.grad_dtype(i));
    const int64_t group = param.sparse ? num_groups : groups.try_emplace(key, num_groups).first->second;
    num_groups = std::max(num_groups, group + 1);
    sizes.push_back({param.tensor.numel(), static_cast<int64_t>(c10::elementSize(key.second)), group});
  }
  return sizes;
}

std::vector<int64_t> BucketPlanner::registration_order() const {
  std::vector<int64_t> order;
  for (size_t i = params_.size(); i > 0; --i) order.push_back(static_cast<int64_t>(i) - 1);
  return order;
}

// torch lists the parameters of its first buckets in the order of registration, and the buckets in reverse.
std::vector<BucketPlan> BucketPlanner::first_buckets() const {
  if (!buffer_.settings.is_hooked) return plan_buckets(param_sizes(), registration_order(), options_.bucket_caps);
  std::vector<BucketPlan> plans = torchs_buckets({}, first_caps_);
  std::reverse(plans.begin(), plans.end());
  return plans;
}

std::vector<BucketPlan> BucketPlanner::buckets_in_order() const {
  return buffer_.settings.is_hooked ? torchs_buckets(fired_, options_.bucket_caps)
                                    : plan_buckets(param_sizes(), fired_, options_.bucket_caps);
}

// Returns the buckets that torch's own function makes. order: empty for the order of registration.
std::vector<BucketPlan> BucketPlanner::torchs_buckets(const std::vector<int64_t>& order,
                                                      const std::vector<int64_t>& caps) const {
  std::vector<at::Tensor> grads;
  std::vector<bool> sparse;
  for (size_t i = 0; i < params_.size(); ++i) {
    const Parameter& param = params_[order.empty() ? i : order[i]];
    const at::Tensor element = at::empty({1}, param.tensor.options().dtype(param.grad_dtype));
    grads.push_back(element.expand({param.tensor.numel()}));
    sparse.push_back(params_[i].sparse);
  }
  const std::vector<size_t> limits(caps.begin(), caps.end());
  const auto [buckets, used_limits] = c10d::compute_bucket_assignment_by_size(grads, limits, sparse, order);
  const std::vector<ParamSize> sizes = param_sizes();
  std::vector<BucketPlan> plans;
  for (const std::vector<size_t>& bucket : buckets) {
    BucketPlan& plan = plans.emplace_back();
    plan.group = sizes[bucket[0]].group;
    for (const size_t param : bucket) {
      plan.entries.push_back({static_cast<int64_t>(param), plan.bytes});
      plan.bytes += sizes[param].numel * sizes[param].element_bytes;
    }
  }
  return plans;
}

void BucketPlanner::begin_step() {
  if (collectives_.steps() == order_step_) fired_.clear();
  const int64_t step = collectives_.steps() - measured_from_;
  marks_step_ = false;
  if (!device_times_ || step >= kMeasuredSteps) return;
  if (device_times_->is_capturing()) {
    has_captured_ = true;
    return;
  }
  marks_step_ = true;
  device_times_->begin_step(step);
}

void BucketPlanner::note_exposed(int64_t nanoseconds) {
  std::vector<double>& exposed = report_.exposed_s;
  if (exposed.size() == kExposedKept) exposed.erase(exposed.begin());
  exposed.push_back(1e-9 * static_cast<double>(nanoseconds));
}

// ---- The plan by order.

bool BucketPlanner::is_due(bool may_leave_out) const {
  if (collectives_.steps() <= order_step_ || buffer_.settings.low_precision.has_value() || may_leave_out) return false;
  return !is_rebuilt_ || (is_measuring_ && !buffer_.settings.reuses_memory && collectives_.steps() >= next_);
}

bool BucketPlanner::rebuild(bool may_leave_out, bool has_hook) {
  if (!is_due(may_leave_out)) return false;
  if (!is_rebuilt_) {
    rebuild_in_order();
  } else if (device_times_) {
    advance_on_device(has_hook);
  } else {
    rebuild_from_measurement(has_hook);
  }
  return true;
}

// The last hook of each parameter counts. Parameters whose hooks never fired come last.
std::vector<int64_t> BucketPlanner::fired_order() const {
  std::vector<int64_t> order;
  std::vector<bool> seen(params_.size(), false);
  const auto add = [&](int64_t index) {
    if (!seen[index]) order.push_back(index);
    seen[index] = true;
  };
  for (size_t i = fired_.size(); i > 0; --i) add(fired_[i - 1]);
  std::reverse(order.begin(), order.end());
  for (int64_t index : registration_order()) add(index);
  return order;
}

void BucketPlanner::rebuild_in_order() {
  is_rebuilt_ = true;
  if (collectives_.comm().is_foreign()) return;
  const std::vector<int64_t> order = fired_order();
  const auto on_device = at::TensorOptions(at::kLong).device(device());
  const at::Tensor holders = at::full({1}, buffer_.are_views_held() ? 1 : 0, on_device);
  collectives_.sum_now(holders, "the number of ranks that hold gradients");
  fired_ = collectives_.from_rank_0(order, kOrder, device());
  const std::vector<BucketPlan> plans = buckets_in_order();
  check_same_everywhere(plans);
  const bool may_move = buffer_.settings.is_hooked || holders.cpu().data_ptr<int64_t>()[0] == 0;
  if (!buffer_.is_in_place(plans) && may_move) {
    const std::vector<at::Tensor> kept = buffer_.copy_kept_gradients();
    use(plans);
    buffer_.put_back(kept);
  }
  begin_measuring(plans);
}

// Plans differ where the ranks' parameters do, which init_sync=True would have found. Ranks that used different plans
// would look for gradients in different regions.
void BucketPlanner::check_same_everywhere(const std::vector<BucketPlan>& plans) {
  const Comm& comm = collectives_.comm();
  const auto all = collectives_.gather({static_cast<double>(hash_of(plans))}, "the buckets' checksums", device());
  for (int rank = 1; rank < comm.size(); ++rank) {
    if (all[rank].data_ptr<double>()[0] == all[0].data_ptr<double>()[0]) continue;
    throw EnvironmentError(text(comm.ranks().name(0), " and ", comm.ranks().name(rank),
                                " make different buckets of the same plan: their parameters differ in number, size, "
                                "dtype or order. Build the same model on every rank; with init_sync=True "
                                "DistributedDataParallel says where they differ."));
  }
}

// ---- The plan from measurement.

void BucketPlanner::begin_measuring(const std::vector<BucketPlan>& plans) {
  is_measuring_ = options_.plan_from_measurement && buffer_.bytes() > 0;
  measured_from_ = collectives_.steps();
  next_ = measured_from_ + kMeasuredSteps;
  if (!is_measuring_) return;
  ready_.assign(kMeasuredSteps * params_.size(), 0);
  if (device().is_cpu()) return;
  const auto is_other = [&](const BucketPlan& plan) { return plan.group != plans[0].group; };
  const bool has_several = std::any_of(plans.begin(), plans.end(), is_other);
  // Where gradients stayed out of the order in which they come, other buckets would move them.
  if (has_several || !buffer_.is_in_place(plans)) {
    is_measuring_ = false;
    report_.why_not = has_several ? kSeveralTypes : kObstacles[kHeldViews];
    return;
  }
  stage_ = DeviceStage::kProbe;
  device_times_.emplace(device(), kMeasuredSteps, params_.size(), probe_sizes().size() * kProbes);
}

void BucketPlanner::rebuild_from_measurement(bool has_hook) {
  is_measuring_ = false;
  const std::vector<double> ready = gather_ready(has_hook);
  ready_ = {};
  if (!report_.why_not.empty()) return;
  const std::vector<at::Tensor> kept = buffer_.copy_kept_gradients();
  Costs costs = measure_costs();
  // Rank 0 decides: other processors might round the floating-point times differently.
  std::vector<int64_t> cuts(params_.size(), 0);
  if (collectives_.comm().rank() == 0) {
    const std::vector<bool> chosen = choose_cuts(param_sizes(), fired_, ready, costs);
    std::copy(chosen.begin(), chosen.end(), cuts.begin());
  }
  cuts = collectives_.from_rank_0(cuts, kCuts, device());
  const std::vector<BucketPlan> plans = cut_buckets(param_sizes(), fired_, std::vector<bool>(cuts.begin(), cuts.end()));
  check_same_everywhere(plans);
  if (!buffer_.is_in_place(plans)) use(plans);
  buffer_.put_back(kept);
  report_.expected = expect(plans, ready, costs);
  report_.costs = std::move(costs);
}

int64_t BucketPlanner::obstacle(bool has_hook) const {
  if (has_hook) return kHook;
  if (misses_times_) return kMissedTimes;
  if (!device_times_) return buffer_.are_views_held() ? kHeldViews : kNone;
  if (has_captured_) return kCaptured;
  return device_times_->have_come() ? kNone : kLate;
}

void BucketPlanner::note_obstacle(int rank, int64_t obstacle) {
  if (obstacle == kNone) return;
  report_.why_not = text("on ", collectives_.comm().ranks().name(rank), " ", kObstacles[obstacle]);
}

// Returns the seconds after which each gradient is there on this rank: the median over the measured steps.
std::vector<double> BucketPlanner::own_ready() const {
  const size_t count = params_.size();
  std::vector<double> ready;
  for (size_t i = 0; i < count; ++i) {
    std::vector<double> steps;
    for (int64_t step = 0; step < kMeasuredSteps; ++step) {
      steps.push_back(device_times_ ? device_times_->gradient_s(step, i) : ready_[step * count + i]);
    }
    ready.push_back(median(steps));
  }
  return ready;
}

// Returns the seconds after which each gradient is there on the last rank. Notes in the report what stands against a
// plan on any rank.
std::vector<double> BucketPlanner::gather_ready(bool has_hook) {
  std::vector<double> mine = {static_cast<double>(obstacle(has_hook))};
  for (double seconds : own_ready()) mine.push_back(seconds);
  const std::vector<at::Tensor> all = collectives_.gather(mine, kTimes, device());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    note_obstacle(static_cast<int>(rank), obstacle_of(all[rank]));
  }
  return latest_ready(all);
}

// all: per rank the obstacle, and then the seconds of each gradient.
std::vector<double> BucketPlanner::latest_ready(const std::vector<at::Tensor>& all) const {
  std::vector<double> ready(params_.size(), 0);
  for (const at::Tensor& of_rank : all) {
    const double* seconds = of_rank.data_ptr<double>() + 1;
    for (size_t i = 0; i < ready.size(); ++i) ready[i] = std::max(ready[i], seconds[i]);
  }
  return ready;
}

// Returns what all-reduces cost on the slowest rank. Destroys what lies in the buffer.
Costs BucketPlanner::measure_costs() {
  return slowest_costs(collectives_.gather(time_all_reduces(probe_sizes()), "the all-reduces' times", device()), 0);
}

std::vector<int64_t> BucketPlanner::probe_sizes() const {
  std::vector<int64_t> sizes;
  const int64_t largest = buffer_.memory().begin()->second.numel() / kAlignment * kAlignment;
  for (int64_t bytes : kProbeBytes) sizes.push_back(std::min(bytes, largest));
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

// all: per rank the seconds of each size, from index `first` on.
Costs BucketPlanner::slowest_costs(const std::vector<at::Tensor>& all, size_t first) const {
  Costs costs{{}, collectives_.comm().in_background()};
  double slowest = kShortest;
  for (int64_t bytes : probe_sizes()) {
    for (const at::Tensor& seconds : all) slowest = std::max(slowest, seconds.data_ptr<double>()[first]);
    costs.points.push_back({bytes, slowest});
    ++first;
  }
  return costs;
}

std::vector<double> BucketPlanner::time_all_reduces(const std::vector<int64_t>& sizes) {
  const at::Tensor memory = buffer_.memory().begin()->second;
  std::vector<double> seconds;
  memory.narrow(0, 0, sizes.back()).zero_();  // subnormal numbers would be slow to add
  for (int64_t bytes : sizes) {
    const int64_t numel = bytes / static_cast<int64_t>(sizeof(float));
    const at::Tensor flat = piece_of(memory, 0, {numel}, {1}, at::kFloat);
    std::vector<double> times;
    for (int probe = -1; probe < kProbes; ++probe) {  // the first lets the ranks meet
      int64_t duration = 0;
      {
        const Stopwatch stopwatch(duration);
        collectives_.sum_now(flat, kProbe);
      }
      if (probe >= 0) times.push_back(1e-9 * static_cast<double>(duration));
    }
    seconds.push_back(median(times));
  }
  return seconds;
}

// ---- The plan from a device's times.

// Each call does one stage. A rank inside a capture gives up: all ranks capture the same steps, or their collectives in
// the graph would not match.
void BucketPlanner::advance_on_device(bool has_hook) {
  if (device_times_->is_capturing()) {
    is_measuring_ = false;
    device_times_.reset();
    note_obstacle(collectives_.comm().rank(), kCaptured);
    return;
  }
  switch (stage_) {
    case DeviceStage::kProbe:
      probe_device();
      stage_ = DeviceStage::kShare;
      next_ = collectives_.steps() + kStepsToShare;
      return;
    case DeviceStage::kShare:
      share_device_times(has_hook);
      stage_ = DeviceStage::kPlan;
      next_ = collectives_.steps() + kStepsToPlan;
      return;
    case DeviceStage::kPlan:
      plan_from_device_times(has_hook);
  }
}

// Sums zeros where gradients lie, as the transport may have registered that memory, and puts the gradients back. The
// largest sums come first. The host gets ahead of the device meanwhile, so that a small sum does not wait for its
// launch.
void BucketPlanner::probe_device() {
  const std::vector<int64_t> sizes = probe_sizes();
  const at::Tensor memory = buffer_.memory().begin()->second;
  const at::Tensor area = memory.narrow(0, 0, sizes.back());
  streams_.wait_for_accumulators();
  const at::Tensor kept = area.clone();
  area.zero_();
  for (size_t i = sizes.size(); i-- > 0;) {
    const int64_t numel = sizes[i] / static_cast<int64_t>(sizeof(float));
    const at::Tensor flat = piece_of(memory, 0, {numel}, {1}, at::kFloat);
    collectives_.sum_now(flat, kProbe);  // lets the ranks meet
    for (size_t probe = i * kProbes; probe < (i + 1) * kProbes; ++probe) {
      collectives_.sum_now(flat, kProbe, Purpose::kPlan, [&] { device_times_->begin_probe(probe); });
      device_times_->end_probe(probe);
    }
  }
  area.copy_(kept);
  streams_.let_accumulators_wait();
}

void BucketPlanner::share_device_times(bool has_hook) {
  const size_t num_sizes = probe_sizes().size();
  const int64_t mine = obstacle(has_hook);
  std::vector<double> times = {static_cast<double>(mine)};
  if (mine == kNone) {
    for (double seconds : own_ready()) times.push_back(seconds);
    for (size_t i = 0; i < num_sizes; ++i) {
      std::vector<double> probes;
      for (size_t probe = i * kProbes; probe < (i + 1) * kProbes; ++probe)
        probes.push_back(device_times_->probe_s(probe));
      times.push_back(median(probes));
    }
  }
  times.resize(1 + params_.size() + num_sizes);
  shared_times_ = collectives_.gather_late(times, kTimes, device());
}

// All ranks must use the plan from the same step on, so that each must know all times here. A host that is three steps
// ahead of its device waits for it once, where torch's class waits in every step.
void BucketPlanner::plan_from_device_times(bool has_hook) {
  const std::vector<at::Tensor> all = collectives_.read(*shared_times_, kTimes);
  bool is_late = false;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const int64_t obstacle = obstacle_of(all[rank]);
    is_late = is_late || obstacle == kLate;
    if (obstacle != kLate) note_obstacle(static_cast<int>(rank), obstacle);
  }
  if (has_hook) note_obstacle(collectives_.comm().rank(), kHook);
  if (is_late && report_.why_not.empty()) {
    share_device_times(has_hook);  // by now the device has reached the marks: they lie before what was shared first
    next_ = (collectives_.steps() / kStepsOfTorchsWait + 1) * kStepsOfTorchsWait - 1;
    return;
  }
  is_measuring_ = false;
  device_times_.reset();
  shared_times_.reset();
  if (!report_.why_not.empty()) return;
  const std::vector<double> ready = latest_ready(all);
  Costs costs = slowest_costs(all, 1 + params_.size());
  const std::vector<BucketPlan> plans =
      cut_buckets(param_sizes(), fired_, choose_cuts(param_sizes(), fired_, ready, costs));
  if (!buffer_.is_in_place(plans)) use(plans);
  report_.expected = expect(plans, ready, costs);
  report_.costs = std::move(costs);
}

}  // namespace drivetrain::ddp
