// Declares the check of gradients before their reduction: whether one is not finite, or a bucket's norm has jumped.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/grad_buffer.h"
#include "ddp/parameter.h"
#include "ddp/side_sum.h"

namespace drivetrain::ddp {

// Reads each bucket once before its reduction, while only this rank's values lie there. A small all-reduce at the end
// of the step carries each rank's findings. All ranks then know and decide the same.
//
// Off the CPU a bucket's check runs on the device. The host waits once, at the end of the step.
class GradientCheck : public SideSum {
 public:
  enum class Mode { kOff, kRaise, kSkip };
  struct Options {
    Mode mode = Mode::kOff;
    // A bucket's norm that exceeds the median of its last norms by this factor is a finding, on the CPU; 0: never.
    double spike_factor = 0;
  };
  // A rank's first finding in a step.
  struct Finding {
    int64_t rank = 0;
    size_t param = 0;
    bool is_spike = false;
  };

  GradientCheck(const Parameters& params, const GradBuffer& buffer, Collectives& collectives)
      : SideSum(collectives, Purpose::kGradientCheck, "the ranks' checks of their gradients"),
        params_(params),
        buffer_(buffer) {}
  void set_options(Options options) { options_ = options; }
  bool is_on() const { return options_.mode != Mode::kOff; }
  bool skips() const { return options_.mode == Mode::kSkip; }

  // ---- A step, in the order of calls.

  void begin_step(BackwardKind kind, bool is_joining) override;
  // Returns true if this step is checked.
  bool is_due() const override { return findings_.defined(); }
  // The bucket's values must be this rank's own.
  void check(size_t bucket);
  // Returns every rank's finding, the same on every rank. Learns the norms of a step without one.
  std::vector<Finding> finish();
  void reset() override;

  // Describes findings: "rank 3 has a gradient that is not finite (nan or inf) for 'layer.weight'; ...".
  std::string describe(const std::vector<Finding>& findings) const;
  // Counts a step whose gradients were dropped.
  void note_skipped(std::string why) { skipped_ = {skipped_.first + 1, std::move(why)}; }
  // Returns their number, and why the last one's were.
  const std::pair<int64_t, std::string>& skipped_steps() const { return skipped_; }

 private:
  at::Tensor values() override { return findings_; }
  void check_on_host(size_t bucket);
  void check_on_device(const Bucket& bucket);
  void note(double code);
  std::optional<size_t> first_not_finite(const Bucket& bucket) const;
  bool is_spike(size_t bucket, double norm) const;
  size_t largest(const Bucket& bucket) const;
  at::Tensor values_of(const Bucket& bucket, size_t param) const;

  const Parameters& params_;
  const GradBuffer& buffer_;
  Options options_;
  // float64 [ranks], on the parameters' device. By rank: 0, or 1 + the parameter's index; negative where it is a spike.
  at::Tensor findings_;
  std::vector<double> norms_;               // by bucket, of this step
  std::vector<std::vector<double>> known_;  // by bucket: norms of the last steps without findings
  std::vector<int64_t> known_bytes_;        // by bucket: a plan with other buckets starts anew
  std::pair<int64_t, std::string> skipped_;
};

}  // namespace drivetrain::ddp
