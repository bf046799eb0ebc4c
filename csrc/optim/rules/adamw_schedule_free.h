// Implements schedule-free AdamW's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// Schedule-free AdamW (Defazio et al. 2024, alg. 1). The parameter is y, where gradients are taken; the state holds z,
// and the average x follows from both. As in the authors' code, the average is weighed by powers of the step's number
// and of the largest learning rate so far.
template <class T>
struct AdamwScheduleFree {
  using Args = AdamwScheduleFree<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumScalars = 2;
  static constexpr const char* kScalarNames[] = {"weight_sum", "lr_max"};
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T beta2, one_minus_beta2, eps, weight_decay, sign;
  T lr;      // after warmup, times sqrt(bias_correction2)
  T weight;  // of z in the average
  T y_step;  // lr * (1 - beta1 * (1 - weight))

  static DT_HOST_DEVICE double lr_of(const Hypers& hyper, double step) {
    const double warmed = step < hyper.warmup_steps ? step / hyper.warmup_steps : 1;
    return hyper.lr * warmed * sqrt(1 - power(hyper.beta2, step));
  }

  static DT_HOST_DEVICE double weight_of(const Hypers& hyper, double step, double lr_max) {
    return real_power(step, hyper.r) * real_power(lr_max, hyper.weight_lr_power);
  }

  static DT_HOST_DEVICE void advance(const Hypers& hyper, double step, Scalars& scalars) {
    set_scalar(scalars, 1, fmax(lr_of(hyper, step), scalars.value[1]));
    set_scalar(scalars, 0, scalars.value[0] + weight_of(hyper, step, scalars.value[1]));
  }

  static DT_HOST_DEVICE AdamwScheduleFree make(const Hypers& hyper, double step, Scalars scalars) {
    AdamwScheduleFree rule;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.eps = hyper.eps;
    rule.weight_decay = hyper.weight_decay;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.lr = lr_of(hyper, step);
    advance(hyper, step, scalars);
    const double sum = scalars.value[0];
    rule.weight = sum > 0 ? weight_of(hyper, step, scalars.value[1]) / sum : 0;
    rule.y_step = rule.lr * (1 - hyper.beta1 * (1 - rule.weight));
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& z = state[0];
    V& exp_avg_sq = state[1];
    grad = sign * grad;
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad);
    V update = grad / (square_root(exp_avg_sq) + eps);
    if (weight_decay != 0) update = update + weight_decay * param;
    param = param + weight * (z - param) - y_step * update;
    z = z - lr * update;
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
