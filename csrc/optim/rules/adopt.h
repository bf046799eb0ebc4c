// Implements ADOPT's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// ADOPT (Taniguchi et al. 2024, alg. 2): Adam with the second moment of the steps before in the denominator, and the
// mean taken after the division. The first step only starts the second moment.
template <class T>
struct Adopt {
  using Args = Adopt<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T lr, one_minus_beta1, beta2, one_minus_beta2, eps, sign;
  T decay;  // multiplies parameters first: 1 - lr * weight_decay if decoupled, else 1
  T l2;     // times the parameter, added to the gradient: weight_decay if not decoupled, else 0
  T clip;   // largest magnitude of a normalized gradient
  T is_first;

  static DT_HOST_DEVICE Adopt make(const Hypers& hyper, double step) {
    const bool decoupled = hyper.decoupled_weight_decay != 0;
    Adopt rule;
    rule.lr = hyper.lr;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.eps = hyper.eps;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = decoupled ? 1 - hyper.lr * hyper.weight_decay : 1;
    rule.l2 = decoupled ? 0 : hyper.weight_decay;
    rule.is_first = step <= 1;
    // The fourth root of the number of steps done.
    rule.clip = hyper.clips != 0 ? sqrt(sqrt(fmax(1.0, step - 1))) : INFINITY;
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    V& exp_avg_sq = state[1];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    const V normalized = grad / maximum(square_root(exp_avg_sq), V(eps));
    const V clipped = minimum(maximum(normalized, V(-clip)), V(clip));
    const V mean = exp_avg + one_minus_beta1 * (clipped - exp_avg);
    exp_avg = is_first != 0 ? exp_avg : mean;
    param = is_first != 0 ? param : param * decay - lr * mean;
    exp_avg_sq = is_first != 0 ? grad * grad : beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad);
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
