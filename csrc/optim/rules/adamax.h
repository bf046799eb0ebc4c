// Implements Adamax's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// Adamax (Kingma & Ba 2015, alg. 2), with eps in the maximum as in torch.
template <class T>
struct Adamax {
  using Args = Adamax<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};  // a norm is never negative, and the step divides by it
  T beta2, one_minus_beta1, eps, l2, sign;
  T step_size;  // lr / bias_correction1

  static DT_HOST_DEVICE Adamax make(const Hypers& hyper, double step) {
    Adamax rule;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.eps = hyper.eps;
    rule.l2 = hyper.weight_decay;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.step_size = hyper.lr / (1 - power(hyper.beta1, step));
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    V& exp_inf = state[1];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
    exp_inf = maximum(beta2 * exp_inf, magnitude_of(grad) + eps);
    param = param - step_size * (exp_avg / exp_inf);
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
