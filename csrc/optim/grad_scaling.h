// What a step makes of gradients before its rules see them: unscaled, clipped, or not stepped with. Host and device;
// not for ISA-compiled files.
#pragma once

#include <cmath>

#include "optim/step.h"

namespace drivetrain::optim {

// What is asked of a step besides its rules.
struct TreatmentAsked {
  double grad_scale = 1;       // gradients are divided by it
  double found_inf = 0;        // above 0: nothing is updated
  bool measures = false;       // the norm; nothing is updated unless it is finite
  double max_norm = INFINITY;  // gradients are clipped to it, as torch.nn.utils.clip_grad_norm_ does it
  bool zeroes = false;         // gradients, whether or not anything is updated
};

// sum_of_squares: of the gradients as they are, where the norm is asked for.
DT_HOST_DEVICE GradTreatment treatment_of(const TreatmentAsked& asked, double sum_of_squares) {
  GradTreatment treatment;
  treatment.factor = 1 / asked.grad_scale;
  if (asked.measures) {
    const double norm = treatment.norm = sqrt(sum_of_squares) / asked.grad_scale;
    treatment.skips = !(norm - norm == 0);  // not finite
    const double clipped = asked.max_norm / (norm + 1e-6);
    if (clipped < 1) treatment.factor *= clipped;
  }
  if (asked.found_inf > 0) treatment.skips = true;
  treatment.after = asked.zeroes ? GradAfter::kZero : treatment.factor == 1 ? GradAfter::kKeep : GradAfter::kTreated;
  return treatment;
}

}  // namespace drivetrain::optim
