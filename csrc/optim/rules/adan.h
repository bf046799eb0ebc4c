// Implements Adan's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// Adan (Xie et al. 2022, alg. 1), with the bias corrections of the authors' code and its betas, which are one minus the
// paper's. As in Adam, the fraction of the step is expanded by the root of the last bias correction.
struct AdanArgs {
  double beta1, beta2, beta3, sign;
  double decay;           // multiplies parameters before the step: 1 - lr * weight_decay, or 1 with the proximal step
  double shrink;          // multiplies them after it: 1 / (1 + lr * weight_decay), or 1 without the proximal step
  double step_size;       // of the mean of gradients
  double diff_step_size;  // of the mean of their differences
  double eps;             // eps * sqrt(bias_correction3)
  double is_first;

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE AdanArgs make(const Hypers& hyper, double step) {
    const bool is_proximal = hyper.no_prox == 0;
    AdanArgs args;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.beta3 = hyper.beta3;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.decay = is_proximal ? 1 : 1 - hyper.lr * hyper.weight_decay;
    args.shrink = is_proximal ? 1 / (1 + hyper.lr * hyper.weight_decay) : 1;
    const double bias_correction3_sqrt = sqrt(1 - power(args.beta3, step));
    args.step_size = hyper.lr / (1 - power(args.beta1, step)) * bias_correction3_sqrt;
    args.diff_step_size = hyper.lr * args.beta2 / (1 - power(args.beta2, step)) * bias_correction3_sqrt;
    args.eps = hyper.eps * bias_correction3_sqrt;
    args.is_first = step <= 1;
    return args;
  }
};

template <class T>
struct Adan {
  using Args = AdanArgs;
  static constexpr int kNumStates = 4;
  static constexpr bool kSquared[kMaxStates] = {false, false, true, false};
  T one_minus_beta1, beta2, one_minus_beta2, beta3, one_minus_beta3;
  T sign, decay, shrink, step_size, diff_step_size, eps;
  bool is_first;

  DT_HOST_DEVICE explicit Adan(const Args& a)
      : one_minus_beta1(T(1 - a.beta1)),
        beta2(T(a.beta2)),
        one_minus_beta2(T(1 - a.beta2)),
        beta3(T(a.beta3)),
        one_minus_beta3(T(1 - a.beta3)),
        sign(T(a.sign)),
        decay(T(a.decay)),
        shrink(T(a.shrink)),
        step_size(T(a.step_size)),
        diff_step_size(T(a.diff_step_size)),
        eps(T(a.eps)),
        is_first(a.is_first != 0) {}

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    V& exp_avg_diff = state[1];
    V& exp_avg_sq = state[2];
    V& previous = state[3];
    grad = sign * grad;
    const V diff = is_first ? V(0) : grad - previous;
    const V ahead = grad + beta2 * diff;
    previous = grad;
    exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
    exp_avg_diff = exp_avg_diff + one_minus_beta2 * (diff - exp_avg_diff);
    exp_avg_sq = beta3 * exp_avg_sq + one_minus_beta3 * (ahead * ahead);
    const V step = step_size * exp_avg + diff_step_size * exp_avg_diff;
    param = (param * decay - step / (square_root(exp_avg_sq) + eps)) * shrink;
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
