// Implements Lion's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// Lion (Chen et al. 2023, alg. 2).
template <class T>
struct Lion {
  using Args = Lion<double>;
  static constexpr bool kCountsSteps = false;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {};
  T lr, beta1, beta2, one_minus_beta1, one_minus_beta2, sign;
  T decay;  // 1 - lr * weight_decay

  static DT_HOST_DEVICE Lion make(const Hypers& hyper, double) {
    Lion rule;
    rule.lr = hyper.lr;
    rule.beta1 = hyper.beta1;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = 1 - hyper.lr * hyper.weight_decay;
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    grad = sign * grad;
    param = param * decay - lr * sign_of(beta1 * exp_avg + one_minus_beta1 * grad);
    exp_avg = beta2 * exp_avg + one_minus_beta2 * grad;
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
