// Implements LAMB's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// LAMB (You et al. 2020, alg. 2): Adam's direction, with a step length relative to the parameter's norm.
struct LambArgs {
  double beta1, beta2, sign, weight_decay;
  double gradient_share;  // 1 - beta1, or 1 without grad_averaging
  double direction_size;  // sqrt(bias_correction2) / bias_correction1
  double eps;             // eps * sqrt(bias_correction2): one division per element, as in Adam
  double step_size;       // lr, times the trust ratio after adapt()
  double adapts;          // whether there is a trust ratio
  double clips;           // whether the trust ratio is limited to 1

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE LambArgs make(const Hypers& hyper, double step) {
    LambArgs args;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.weight_decay = hyper.weight_decay;
    args.gradient_share = hyper.grad_averaging != 0 ? 1 - args.beta1 : 1;
    const bool corrects = hyper.bias_correction != 0;
    const double correction1 = corrects ? 1 - power(args.beta1, step) : 1;
    const double correction2_sqrt = corrects ? sqrt(1 - power(args.beta2, step)) : 1;
    args.direction_size = correction2_sqrt / correction1;
    args.eps = hyper.eps * correction2_sqrt;
    args.step_size = hyper.lr;
    args.adapts = args.weight_decay != 0 || hyper.always_adapt != 0;
    args.clips = hyper.trust_clip;
    return args;
  }

  DT_HOST_DEVICE void adapt(const TrustRatioSums& sums, int64_t) {
    if (adapts == 0 || !(sums.param > 0) || !(sums.direction > 0)) return;
    const double ratio = sqrt(sums.param / sums.direction);
    step_size *= clips != 0 && ratio > 1 ? 1 : ratio;
  }
};

template <class T>
struct Lamb {
  using Args = LambArgs;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T beta1, beta2, one_minus_beta2, sign, weight_decay, gradient_share, direction_size, eps, step_size;

  DT_HOST_DEVICE explicit Lamb(const Args& a)
      : beta1(T(a.beta1)),
        beta2(T(a.beta2)),
        one_minus_beta2(T(1 - a.beta2)),
        sign(T(a.sign)),
        weight_decay(T(a.weight_decay)),
        gradient_share(T(a.gradient_share)),
        direction_size(T(a.direction_size)),
        eps(T(a.eps)),
        step_size(T(a.step_size)) {}

  DT_HOST_DEVICE T direction(T param, T grad, T (&state)[kMaxStates]) const {
    T& exp_avg = state[0];
    T& exp_avg_sq = state[1];
    grad = sign * grad;
    exp_avg = beta1 * exp_avg + gradient_share * grad;
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad);
    return direction_size * (exp_avg / (square_root(exp_avg_sq) + eps)) + weight_decay * param;
  }

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    param = param - step_size * direction(param, grad, state);
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
