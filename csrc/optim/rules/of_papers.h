// Implements the arithmetic of rules that torch lacks: Lion, ADOPT, Adan and schedule-free AdamW. Host and device;
// needs no torch header.
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

// ADOPT (Taniguchi et al. 2024, alg. 2): Adam with the second moment of the steps before in the denominator, and the
// mean taken after the division. The first step only starts the second moment.
template <class T>
struct Adopt {
  using Args = Adopt<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T lr, one_minus_beta1, beta2, one_minus_beta2, eps, sign;
  T decay, l2;  // see decay_of() and l2_of()
  T clip;       // largest magnitude of a normalized gradient
  T is_first;

  static DT_HOST_DEVICE Adopt make(const Hypers& hyper, double step) {
    Adopt rule;
    rule.lr = hyper.lr;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.eps = hyper.eps;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = decay_of(hyper);
    rule.l2 = l2_of(hyper);
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
