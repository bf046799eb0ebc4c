// Implements LAMB's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// LAMB (You et al. 2020, alg. 2): Adam's direction, with a step length relative to the parameter's norm.
template <class T>
struct Lamb {
  using Args = Lamb<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T beta1, beta2, one_minus_beta2, sign, weight_decay;
  T gradient_share;  // 1 - beta1, or 1 without grad_averaging
  T direction_size;  // sqrt(bias_correction2) / bias_correction1
  T eps;             // eps * sqrt(bias_correction2): one division per element, as in Adam
  T step_size;       // lr, times the trust ratio after adapt()
  T adapts;          // whether there is a trust ratio
  T clips;           // whether the trust ratio is limited to 1

  static DT_HOST_DEVICE Lamb make(const Hypers& hyper, double step) {
    Lamb rule;
    rule.beta1 = hyper.beta1;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.weight_decay = hyper.weight_decay;
    rule.gradient_share = hyper.grad_averaging != 0 ? 1 - hyper.beta1 : 1;
    const bool corrects = hyper.bias_correction != 0;
    const double correction1 = corrects ? 1 - power(hyper.beta1, step) : 1;
    const double correction2_sqrt = corrects ? sqrt(1 - power(hyper.beta2, step)) : 1;
    rule.direction_size = correction2_sqrt / correction1;
    rule.eps = hyper.eps * correction2_sqrt;
    rule.step_size = hyper.lr;
    rule.adapts = hyper.weight_decay != 0 || hyper.always_adapt != 0;
    rule.clips = hyper.trust_clip;
    return rule;
  }

  DT_HOST_DEVICE void adapt(const TrustRatioSums& sums, int64_t) {
    if (adapts == 0 || !(sums.param > 0) || !(sums.direction > 0)) return;
    const double ratio = sqrt(sums.param / sums.direction);
    step_size *= clips != 0 && ratio > 1 ? 1 : ratio;
  }

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

DT_END_ISA

}  // namespace drivetrain::optim
