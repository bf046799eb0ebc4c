// Implements NAdam's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

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
  T decay;  // multiplies parameters first: 1 - lr * weight_decay if decoupled, else 1
  T l2;     // times the parameter, added to the gradient: weight_decay if not decoupled, else 0
  T eps;    // eps * sqrt(bias_correction2)
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
    const bool decoupled = hyper.decoupled_weight_decay != 0;
    Nadam rule;
    rule.beta2 = hyper.beta2;
    rule.one_minus_beta1 = 1 - hyper.beta1;
    rule.one_minus_beta2 = 1 - hyper.beta2;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.decay = decoupled ? 1 - hyper.lr * hyper.weight_decay : 1;
    rule.l2 = decoupled ? 0 : hyper.weight_decay;
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

DT_END_ISA

}  // namespace drivetrain::optim
