// Implements Adan's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// Adan (Xie et al. 2022, alg. 1), with the bias corrections of the authors' code and its betas, which are one minus the
// paper's. As in Adam, the fraction of the step is expanded by the root of the last bias correction.
template <class T>
struct Adan {
  using Args = Adan<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 4;
  static constexpr bool kSquared[kMaxStates] = {false, false, true, false};
  T one_minus_beta1, beta2, one_minus_beta2, beta3, one_minus_beta3, sign;
  T decay;           // multiplies parameters before the step: 1 - lr * weight_decay, or 1 with the proximal step
  T shrink;          // multiplies them after it: 1 / (1 + lr * weight_decay), or 1 without the proximal step
  T step_size;       // of the mean of gradients
  T diff_step_size;  // of the mean of their differences
  T eps;             // eps * sqrt(bias_correction3)
  T is_first;

  static DT_HOST_DEVICE Adan make(const Hypers& hyper, double step) {
    const bool is_proximal = hyper.no_prox == 0;
    Adan rule;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.beta3 = hyper.beta3;
    rule.one_minus_beta3 = 1 - hyper.beta3;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = is_proximal ? 1 : 1 - hyper.lr * hyper.weight_decay;
    rule.shrink = is_proximal ? 1 / (1 + hyper.lr * hyper.weight_decay) : 1;
    const double bias_correction3_sqrt = sqrt(1 - power(hyper.beta3, step));
    rule.step_size = hyper.lr / (1 - power(hyper.beta1, step)) * bias_correction3_sqrt;
    rule.diff_step_size = hyper.lr * hyper.beta2 / (1 - power(hyper.beta2, step)) * bias_correction3_sqrt;
    rule.eps = hyper.eps * bias_correction3_sqrt;
    rule.is_first = step <= 1;
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    V& exp_avg_diff = state[1];
    V& exp_avg_sq = state[2];
    V& previous = state[3];
    grad = sign * grad;
    const V diff = is_first != 0 ? V(0) : grad - previous;
    const V ahead = grad + beta2 * diff;
    previous = grad;
    exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
    exp_avg_diff = exp_avg_diff + one_minus_beta2 * (diff - exp_avg_diff);
    exp_avg_sq = beta3 * exp_avg_sq + one_minus_beta3 * (ahead * ahead);
    const V step = step_size * exp_avg + diff_step_size * exp_avg_diff;
    param = (param * decay - step / (square_root(exp_avg_sq) + eps)) * shrink;
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
