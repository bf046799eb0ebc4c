// Computes a step's grad scaling: unscaling, clipping, and whether the step is skipped. Host and device; not for
// ISA-compiled files.
#pragma once

#include <cmath>

#include "optim/step.h"

namespace drivetrain::optim {

// Options of a step besides its rules.
struct GradScalingOptions {
  double grad_scale = 1;       // divides gradients
  double found_inf = 0;        // above 0: skips the step
  bool measures = false;       // measures the norm; skips the step if it is not finite
  double max_norm = INFINITY;  // clips gradients to this norm, as torch.nn.utils.clip_grad_norm_ does
  bool zeroes = false;         // zeroes gradients, also in a skipped step
};

// `sum_of_squares` is the sum over the scaled gradients, if the norm is measured.
DT_HOST_DEVICE GradScaling grad_scaling_of(const GradScalingOptions& asked, double sum_of_squares) {
  GradScaling grad_scaling;
  grad_scaling.factor = 1 / asked.grad_scale;
  if (asked.measures) {
    const double norm = grad_scaling.norm = sqrt(sum_of_squares) / asked.grad_scale;
    grad_scaling.skips = !(norm - norm == 0);  // not finite
    const double clipped = asked.max_norm / (norm + 1e-6);
    if (clipped < 1) grad_scaling.factor *= clipped;
  }
  if (asked.found_inf > 0) grad_scaling.skips = true;
  grad_scaling.after = asked.zeroes               ? GradAfter::kZero
                       : grad_scaling.factor == 1 ? GradAfter::kKeep
                                                  : GradAfter::kScaled;
  return grad_scaling;
}

}  // namespace drivetrain::optim
