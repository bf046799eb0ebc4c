// Implements NAdam's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// NAdam (Dozat 2016, alg. 2), with torch's decay of the momentum. The formula of the step is
//
//   lr * ((1 - mu) / (1 - mu_product) * grad + mu_next / (1 - mu_product * mu_next) * exp_avg)
//   / (sqrt(exp_avg_sq / bias_correction2) + eps)
//
// Its fraction is expanded by sqrt(bias_correction2), as Adam's is.
struct NadamArgs {
  double beta1, beta2, sign;
  double decay;  // multiplies parameters first: 1 - lr * weight_decay if decoupled, else 1
  double l2;     // times the parameter, added to the gradient: weight_decay if not decoupled, else 0
  double eps;    // eps * sqrt(bias_correction2)
  double grad_step, exp_avg_step;

  static constexpr bool kCountsSteps = true;
  static constexpr int kNumScalars = 1;
  static constexpr const char* kScalarNames[] = {"mu_product"};

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

  static DT_HOST_DEVICE NadamArgs make(const Hypers& hyper, double step, Scalars scalars) {
    const bool decoupled = hyper.decoupled_weight_decay != 0;
    NadamArgs args;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.decay = decoupled ? 1 - hyper.lr * hyper.weight_decay : 1;
    args.l2 = decoupled ? 0 : hyper.weight_decay;
    const double bias_correction2_sqrt = sqrt(1 - power(args.beta2, step));
    args.eps = hyper.eps * bias_correction2_sqrt;
    advance(hyper, step, scalars);
    const double mu = mu_of(hyper, step), mu_next = mu_of(hyper, step + 1), product = scalars.value[0];
    args.grad_step = hyper.lr * (1 - mu) / (1 - product) * bias_correction2_sqrt;
    args.exp_avg_step = hyper.lr * mu_next / (1 - product * mu_next) * bias_correction2_sqrt;
    return args;
  }
};

template <class T>
struct Nadam {
  using Args = NadamArgs;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T beta2, one_minus_beta1, one_minus_beta2, sign, decay, l2, eps, grad_step, exp_avg_step;

  DT_HOST_DEVICE explicit Nadam(const Args& a)
      : beta2(T(a.beta2)),
        one_minus_beta1(T(1 - a.beta1)),
        one_minus_beta2(T(1 - a.beta2)),
        sign(T(a.sign)),
        decay(T(a.decay)),
        l2(T(a.l2)),
        eps(T(a.eps)),
        grad_step(T(a.grad_step)),
        exp_avg_step(T(a.exp_avg_step)) {}

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

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
