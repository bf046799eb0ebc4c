// Rebuilds the buckets by the order and the times of gradients.
#include "ddp/bucket_planner.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

constexpr size_t kExposedKept = 64;  // steps

// Sizes of the all-reduces that are timed once for a plan, each as often as a median needs.
constexpr int64_t kProbeBytes[] = {64 << 10, 1 << 20, 4 << 20, 16 << 20};
constexpr int kProbes = 5;

// Reasons why a measurement leads to no plan. Ranks tell each other the index.
constexpr const char* kObstacles[] = {
    "",
    "a communication hook reduces",
    "a rank ran out of inputs, or no forward prepared a backward, in the steps that were to be measured",
    "the script keeps references to .grad tensors, which must go on showing their parameters' gradients",
};

constexpr const char* kOrder = "the buckets' order";
constexpr const char* kCuts = "the buckets' sizes";

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

BucketPlanner::BucketPlanner(const Parameters& params, GradBuffer& buffer, Collectives& collectives, Options options)
    : params_(params), buffer_(buffer), collectives_(collectives), options_(std::move(options)) {}

void BucketPlanner::start_over() {
  is_rebuilt_ = is_measuring_ = misses_times_ = false;
  fired_.clear();
  use(plan_buckets(param_sizes(), registration_order(), options_.bucket_caps));
}

void BucketPlanner::use(const std::vector<BucketPlan>& plans) {
  buffer_.build(plans, collectives_.comm());
  report_ = PlanReport();
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

void BucketPlanner::begin_step() {
  if (collectives_.steps() == 0) fired_.clear();
}

void BucketPlanner::note_exposed(int64_t nanoseconds) {
  std::vector<double>& exposed = report_.exposed_s;
  if (exposed.size() == kExposedKept) exposed.erase(exposed.begin());
  exposed.push_back(1e-9 * static_cast<double>(nanoseconds));
}

// ---- The plan by order.

bool BucketPlanner::is_due(bool may_leave_out) const {
  if (collectives_.steps() == 0 || buffer_.settings.low_precision.has_value() || may_leave_out) return false;
  return !is_rebuilt_ ||
         (is_measuring_ && !buffer_.settings.reuses_memory && collectives_.steps() >= measured_from_ + kMeasuredSteps);
}

bool BucketPlanner::rebuild(bool may_leave_out, bool has_hook) {
  if (!is_due(may_leave_out)) return false;
  if (!is_rebuilt_) {
    rebuild_in_order();
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
  const std::vector<int64_t> order = fired_order();
  const auto on_device = at::TensorOptions(at::kLong).device(device());
  const at::Tensor holders = at::full({1}, buffer_.are_views_held() ? 1 : 0, on_device);
  collectives_.sum_now(holders, "the number of ranks that hold gradients");
  fired_ = collectives_.from_rank_0(order, kOrder, device());
  is_measuring_ = options_.plan_from_measurement && buffer_.bytes() > 0;
  if (is_measuring_) ready_.assign(kMeasuredSteps * params_.size(), 0);
  measured_from_ = collectives_.steps();
  const std::vector<BucketPlan> plans = plan_buckets(param_sizes(), fired_, options_.bucket_caps);
  check_same_everywhere(plans);
  if (buffer_.is_in_place(plans) || holders.cpu().data_ptr<int64_t>()[0] > 0) return;
  const std::vector<at::Tensor> kept = buffer_.copy_kept_gradients();
  use(plans);
  buffer_.put_back(kept);
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

// Returns an index into kObstacles.
int64_t BucketPlanner::obstacle(bool has_hook) const {
  if (has_hook) return 1;
  if (misses_times_) return 2;
  return buffer_.are_views_held() ? 3 : 0;
}

// Returns the seconds after which each gradient is there on the last rank: the median over the measured steps. Notes in
// the report what stands against a plan on any rank.
std::vector<double> BucketPlanner::gather_ready(bool has_hook) {
  const size_t count = params_.size();
  std::vector<double> mine = {static_cast<double>(obstacle(has_hook))};
  for (size_t i = 0; i < count; ++i) {
    std::vector<double> steps;
    for (int64_t step = 0; step < kMeasuredSteps; ++step) steps.push_back(ready_[step * count + i]);
    mine.push_back(median(steps));
  }
  const Comm& comm = collectives_.comm();
  const std::vector<at::Tensor> all = collectives_.gather(mine, "the gradients' times", device());
  std::vector<double> ready(count, 0);
  for (int rank = 0; rank < comm.size(); ++rank) {
    const double* values = all[rank].data_ptr<double>();
    if (values[0] != 0)
      report_.why_not = text("on ", comm.ranks().name(rank), " ", kObstacles[static_cast<int64_t>(values[0])]);
    for (size_t i = 0; i < count; ++i) ready[i] = std::max(ready[i], values[1 + i]);
  }
  return ready;
}

// Returns what all-reduces cost on the slowest rank. Destroys what lies in the buffer.
Costs BucketPlanner::measure_costs() {
  std::vector<int64_t> sizes;
  const int64_t largest = buffer_.memory().begin()->second.numel() / kAlignment * kAlignment;
  for (int64_t bytes : kProbeBytes) sizes.push_back(std::min(bytes, largest));
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  const std::vector<at::Tensor> all = collectives_.gather(time_all_reduces(sizes), "the all-reduces' times", device());
  Costs costs{{}, collectives_.comm().in_background()};
  for (size_t i = 0; i < sizes.size(); ++i) {
    double slowest = i == 0 ? 0 : costs.points.back().seconds;
    for (const at::Tensor& seconds : all) slowest = std::max(slowest, seconds.data_ptr<double>()[i]);
    costs.points.push_back({sizes[i], slowest});
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
        collectives_.sum_now(flat, "a probe that is timed");
      }
      if (probe >= 0) times.push_back(1e-9 * static_cast<double>(duration));
    }
    seconds.push_back(median(times));
  }
  return seconds;
}

}  // namespace drivetrain::ddp
