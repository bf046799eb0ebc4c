// Implements RAdam's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// RAdam (Liu et al. 2020, alg. 2), with torch's eps and weight decay. Where the variance cannot be rectified yet, the
// step has no divisor.
template <class T>
struct Radam {
  using Args = Radam<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T beta2, one_minus_beta1, one_minus_beta2, sign;
  T decay;  // multiplies parameters first: 1 - lr * weight_decay if decoupled, else 1
  T l2;     // times the parameter, added to the gradient: weight_decay if not decoupled, else 0
  T eps, is_rectified;
  T step_size;  // lr / bias_correction1, times the rectification and sqrt(bias_correction2) if rectified

  static DT_HOST_DEVICE Radam make(const Hypers& hyper, double step) {
    const bool decoupled = hyper.decoupled_weight_decay != 0;
    Radam rule;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = decoupled ? 1 - hyper.lr * hyper.weight_decay : 1;
    rule.l2 = decoupled ? 0 : hyper.weight_decay;
    rule.eps = hyper.eps;
    const double beta2_power = power(hyper.beta2, step), bias_correction2 = 1 - beta2_power;
    // Lengths of the simple moving average: the maximum, and the approximation at this step.
    const double rho_inf = 2 / (1 - hyper.beta2) - 1;
    const double rho = rho_inf - 2 * step * beta2_power / bias_correction2;
    rule.is_rectified = rho > 5;
    rule.step_size = hyper.lr / (1 - power(hyper.beta1, step));
    if (rho > 5) {
      const double rectification = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho);
      rule.step_size *= sqrt(rectification) * sqrt(bias_correction2);
    }
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    V& exp_avg_sq = state[1];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    param = param * decay;
    exp_avg = interpolated(exp_avg, grad, V(one_minus_beta1));
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad);
    const V denominator = is_rectified != 0 ? square_root(exp_avg_sq) + eps : V(1);
    param = param - step_size * (exp_avg / denominator);
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
