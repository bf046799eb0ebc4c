// Implements Adam's and AdamW's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// Adam and AdamW (Kingma & Ba 2015, alg. 1; Loshchilov & Hutter 2019, alg. 2). The formula of the step is
//
//   lr / bias_correction1 * exp_avg / (sqrt(exp_avg_sq) / sqrt(bias_correction2) + eps)
//
// Its fraction is expanded by sqrt(bias_correction2), as section 2 of the first paper suggests. That takes one division
// per element instead of two and keeps the loop at the speed of memory.
template <class T, bool kAmsgrad>
struct AdamRule {
  using Args = AdamRule<double, kAmsgrad>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = kAmsgrad ? 3 : 2;
  static constexpr bool kSquared[kMaxStates] = {false, true, true};
  T beta2, one_minus_beta1, one_minus_beta2;
  T sign;       // -1 to maximize, else 1
  T decay;      // multiplies parameters first: 1 - lr * weight_decay if decoupled, else 1
  T l2;         // times the parameter, added to the gradient: weight_decay if not decoupled, else 0
  T step_size;  // lr / bias_correction1 * sqrt(bias_correction2)
  T eps;        // eps * sqrt(bias_correction2)

  // `step` counts from 1.
  static DT_HOST_DEVICE AdamRule make(const Hypers& hyper, double step) {
    const double lr = hyper.lr, weight_decay = hyper.weight_decay;
    const bool decoupled = hyper.decoupled_weight_decay != 0;
    AdamRule rule;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = decoupled ? 1 - lr * weight_decay : 1;
    rule.l2 = decoupled ? 0 : weight_decay;
    const double bias_correction2_sqrt = sqrt(1 - power(hyper.beta2, step));
    rule.step_size = lr / (1 - power(hyper.beta1, step)) * bias_correction2_sqrt;
    rule.eps = hyper.eps * bias_correction2_sqrt;
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    V& exp_avg_sq = state[1];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    param = param * decay;
    exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad);
    V second_moment = exp_avg_sq;
    if constexpr (kAmsgrad) second_moment = state[2] = maximum(state[2], exp_avg_sq);
    param = param - step_size * (exp_avg / (square_root(second_moment) + eps));
  }
};
template <class T>
using Adam = AdamRule<T, false>;
template <class T>
using AdamAmsgrad = AdamRule<T, true>;

DT_END_ISA

}  // namespace drivetrain::optim
