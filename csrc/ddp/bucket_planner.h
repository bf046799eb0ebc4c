// Declares the planner that lays out the buckets again once it has seen the order and the times of gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/transfer.h"
#include "ddp/bucket_plan.h"
#include "ddp/collectives.h"
#include "ddp/device_times.h"
#include "ddp/grad_buffer.h"
#include "ddp/parameter.h"
#include "ddp/step_streams.h"

namespace drivetrain::ddp {

// Describes the plan of the present buckets.
struct PlanReport {
  std::vector<ExpectedBucket> expected;  // per bucket; empty: not measured
  std::string why_not;                   // why a measurement led to no plan; "": it did, or none was made
  Costs costs;
  std::vector<double> exposed_s;  // of the last steps with these buckets, in seconds
};

// Buckets are rebuilt once, after the first synchronized step, in the order in which rank 0's gradients came. With
// plan_from_measurement they are rebuilt once more, after three further steps, in the sizes that leave the least
// communication exposed. A rebuild happens when a synchronized backward's first gradient comes: all ranks take part
// there, and `.grad` is usually still empty. If a script refers to a view of the buffer besides `.grad` on any rank,
// all ranks leave everything where it is.
//
// On a device the second rebuild takes five more steps, so that the host need not wait for the device:
//   1. In three steps marks on the device's streams tell when gradients come.
//   2. The next step begins with all-reduces between two marks.
//   3. Two steps later the ranks share their times, where the device has reached the marks by then.
//   4. Three steps later every rank chooses the same sizes from the times of all ranks.
// This rebuild moves no gradient, so that graphs that have captured addresses, and references to views, stay valid.
//
// Invariants: is_due() depends only on what all ranks know. All ranks use the same plan. On the CPU rank 0 decides what
// depends on measurements; on a device all ranks compute the plan from the same values.
class BucketPlanner {
 public:
  struct Options {
    std::vector<int64_t> bucket_caps;  // bytes, in the expected order of buckets; the last repeats
    bool plan_from_measurement = false;
  };

  BucketPlanner(const Parameters& params, GradBuffer& buffer, const StepStreams& streams, Collectives& collectives,
                Options options);

  // Lays out the buckets in the order in which gradients are expected until they are measured: the reverse of the
  // parameters' registration. Forgets what it has seen.
  void start_over();
  // Lays out these buckets. The report starts again.
  void use(const std::vector<BucketPlan>& plans);
  // Lays out the buckets as torch's class does from now on, for a communication hook. first_caps: bytes per bucket
  // until torch rebuilds. is_static: the graph is, so that torch rebuilds a step later.
  void follow_torch(std::vector<int64_t> first_caps, bool is_static);

  // ---- A step, in the order of calls.

  // Rebuilds the buckets if that is due. Communicates then. may_leave_out: a step may use other parameters than the one
  // before, so that its order means nothing; has_hook: a communication hook reduces. Returns true if it was due.
  bool rebuild(bool may_leave_out, bool has_hook);
  void begin_step();
  // Notes that the parameter's hook has fired in this step.
  void note_order(size_t param) {
    if (collectives_.steps() == order_step_) fired_.push_back(static_cast<int64_t>(param));
  }
  // Notes that the parameter's gradient is complete.
  void note_time(size_t param, const StepTimes& now) {
    const int64_t step = collectives_.steps() - measured_from_;
    if (!is_measuring_ || step >= kMeasuredSteps) return;
    if (device_times_) {
      if (marks_step_) device_times_->note_gradient(step, param);
      return;
    }
    const int64_t since = clock_ns() - now.backward_start - now.exposed;
    ready_[step * params_.size() + param] = 1e-9 * static_cast<double>(since);
  }
  // Notes a step whose gradients' times this rank does not see.
  void miss_times() { misses_times_ = misses_times_ || is_measuring_; }
  void note_exposed(int64_t nanoseconds);

  bool has_rebuilt() const { return is_rebuilt_; }
  const PlanReport& report() const { return report_; }

 private:
  static constexpr int64_t kMeasuredSteps = 3;  // after the step whose gradients gave the order
  // The next thing to do for a plan from a device's times.
  enum class DeviceStage { kProbe, kShare, kPlan };

  bool is_due(bool may_leave_out) const;
  void rebuild_in_order();
  void begin_measuring(const std::vector<BucketPlan>& plans);
  void rebuild_from_measurement(bool has_hook);
  void advance_on_device(bool has_hook);
  void probe_device();
  void share_device_times(bool has_hook);
  void plan_from_device_times(bool has_hook);
  std::vector<ParamSize> param_sizes() const;
  std::vector<int64_t> registration_order() const;
  std::vector<BucketPlan> first_buckets() const;
  std::vector<BucketPlan> buckets_in_order() const;
  std::vector<BucketPlan> torchs_buckets(const std::vector<int64_t>& order, const std::vector<int64_t>& caps) const;
  std::vector<int64_t> fired_order() const;
  int64_t obstacle(bool has_hook) const;
  void note_obstacle(int rank, int64_t obstacle);
  std::vector<double> own_ready() const;
  std::vector<double> gather_ready(bool has_hook);
  std::vector<double> latest_ready(const std::vector<at::Tensor>& all) const;
  Costs measure_costs();
  std::vector<int64_t> probe_sizes() const;
  std::vector<double> time_all_reduces(const std::vector<int64_t>& sizes);
  Costs slowest_costs(const std::vector<at::Tensor>& all, size_t first) const;
  void check_same_everywhere(const std::vector<BucketPlan>& plans);
  c10::Device device() const { return params_[0].tensor.device(); }

  const Parameters& params_;
  GradBuffer& buffer_;
  const StepStreams& streams_;
  Collectives& collectives_;
  const Options options_;
  std::vector<int64_t> first_caps_;  // torch's until its rebuild, once a communication hook reduces
  int64_t order_step_ = 0;           // finished steps at the step whose order counts
  std::vector<int64_t> fired_;       // parameters in the order of hooks in that step; after a rebuild rank 0's order
  bool is_rebuilt_ = false;
  bool is_measuring_ = false;  // from the first rebuild to the second
  int64_t measured_from_ = 0;  // finished steps at the first rebuild
  int64_t next_ = 0;           // finished steps when the second rebuild, or its next stage on a device, is due
  bool misses_times_ = false;
  std::vector<double> ready_;  // [kMeasuredSteps][parameters], seconds from the first gradient
  DeviceStage stage_ = DeviceStage::kProbe;
  std::optional<DeviceTimes> device_times_;  // while a device is measured
  bool marks_step_ = false;                  // the current step is measured on the device
  bool has_captured_ = false;                // a step that was to be measured is part of a CUDA graph
  std::unique_ptr<LateValue> shared_times_;  // of all ranks
  PlanReport report_;
};

}  // namespace drivetrain::ddp
