// Declares the norms of each rank's own gradients and of their mean, from which the gradient noise scale follows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "ddp/grad_buffer.h"
#include "ddp/parameter.h"
#include "ddp/side_sum.h"

namespace drivetrain::ddp {

// Measures every so many synchronized steps. Such a step reads each bucket before its reduction and each mean after it,
// and makes a sum over ranks. The host waits for no device.
class GradientNoise : public SideSum {
 public:
  struct Norms {
    int64_t step;        // synchronized, from 1
    int64_t ranks;       // their number
    at::Tensor squares;  // float64 [2]: of the ranks' own gradients, summed over ranks, and of the mean
  };

  GradientNoise(const Parameters& params, const GradBuffer& buffer, Collectives& collectives)
      : SideSum(collectives, Purpose::kGradientNoise, "the norms of the ranks' gradients"),
        params_(params),
        buffer_(buffer) {}
  // Measures the next step and every so many after it; 0: none.
  void set_every(int64_t every);
  // Says whether the step that begins is a plain mean of dense gradients, which stays in the buffer to the end.
  void set_is_plain(bool is_plain) { is_plain_ = is_plain; }

  // ---- A step, in the order of calls.

  void begin_step(BackwardKind kind, bool is_joining) override;
  bool is_due() const override { return own_.defined(); }
  // The bucket's values must be this rank's own, times the factor.
  void add(const Bucket& bucket, double factor);
  // The buffer must hold the means.
  void finish();
  void reset() override;

  // Returns the norms of the last step that was measured.
  const std::optional<Norms>& last() const { return last_; }

 private:
  at::Tensor values() override { return own_; }
  // Returns the sum of squares of parameters in the buffer: float64 [1].
  at::Tensor squares_of(const std::vector<size_t>& params) const;

  const Parameters& params_;
  const GradBuffer& buffer_;
  int64_t every_ = 0, first_ = 0;
  bool is_plain_ = true;
  at::Tensor own_;  // float64 [1]; undefined where nothing is measured
  std::optional<Norms> last_;
};

}  // namespace drivetrain::ddp
