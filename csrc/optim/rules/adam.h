// Implements the arithmetic of Adam, AdamW, Adamax, NAdam and RAdam. Host and device; needs no torch header.
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
  T decay, l2;  // see decay_of() and l2_of()
  T step_size;  // lr / bias_correction1 * sqrt(bias_correction2)
  T eps;        // eps * sqrt(bias_correction2)

  // `step` counts from 1.
  static DT_HOST_DEVICE AdamRule make(const Hypers& hyper, double step) {
    AdamRule rule;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = decay_of(hyper);
    rule.l2 = l2_of(hyper);
    const double bias_correction2_sqrt = sqrt(1 - power(hyper.beta2, step));
    rule.step_size = hyper.lr / (1 - power(hyper.beta1, step)) * bias_correction2_sqrt;
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

// NAdam (Dozat 2016, alg. 2), with torch's decay of the momentum. The formula of the step is
//
//   lr * ((1 - mu) / (1 - mu_product) * grad + mu_next / (1 - mu_product * mu_next) * exp_avg)
//   / (sqrt(exp_avg_sq / bias_correction2) + eps)
//
// Its fraction is expanded by sqrt(bias_correction2), as Adam's is.
template <class T>
struct Nadam {
  using Args = Nadam<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumScalars = 1;
  static constexpr const char* kScalarNames[] = {"mu_product"};
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T beta2, one_minus_beta1, one_minus_beta2, sign;
  T decay, l2;  // see decay_of() and l2_of()
  T eps;        // eps * sqrt(bias_correction2)
  T grad_step, exp_avg_step;

  // Returns a step's momentum, which approaches beta1.
  static DT_HOST_DEVICE double mu_of(const Hypers& hyper, double step) {
    return hyper.beta1 * (1 - 0.5 * real_power(0.96, step * hyper.momentum_decay));
  }

  // Advances the product of all momenta so far. torch multiplies in the product's own dtype.
  static DT_HOST_DEVICE void advance(const Hypers& hyper, double step, Scalars& scalars) {
    double mu = mu_of(hyper, step);
    if (!scalars.is_double[0]) mu = static_cast<float>(mu);
    set_scalar(scalars, 0, scalars.value[0] * mu);
  }

  static DT_HOST_DEVICE Nadam make(const Hypers& hyper, double step, Scalars scalars) {
    Nadam rule;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = decay_of(hyper);
    rule.l2 = l2_of(hyper);
    const double bias_correction2_sqrt = sqrt(1 - power(hyper.beta2, step));
    rule.eps = hyper.eps * bias_correction2_sqrt;
    advance(hyper, step, scalars);
    const double mu = mu_of(hyper, step), mu_next = mu_of(hyper, step + 1), product = scalars.value[0];
    rule.grad_step = hyper.lr * (1 - mu) / (1 - product) * bias_correction2_sqrt;
    rule.exp_avg_step = hyper.lr * mu_next / (1 - product * mu_next) * bias_correction2_sqrt;
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
    param = param - (grad_step * grad + exp_avg_step * exp_avg) / (square_root(exp_avg_sq) + eps);
  }
};

// RAdam (Liu et al. 2020, alg. 2), with torch's eps and weight decay. Where the variance cannot be rectified yet, the
// step has no divisor.
template <class T>
struct Radam {
  using Args = Radam<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T beta2, one_minus_beta1, one_minus_beta2, sign;
  T decay, l2;  // see decay_of() and l2_of()
  T eps, is_rectified;
  T step_size;  // lr / bias_correction1, times the rectification and sqrt(bias_correction2) if rectified

  static DT_HOST_DEVICE Radam make(const Hypers& hyper, double step) {
    Radam rule;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = decay_of(hyper);
    rule.l2 = l2_of(hyper);
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
