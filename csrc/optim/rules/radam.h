// Implements RAdam's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// RAdam (Liu et al. 2020, alg. 2), with torch's eps and weight decay. Where the variance cannot be rectified yet, the
// step has no divisor.
struct RadamArgs {
  double beta1, beta2, sign;
  double decay;  // multiplies parameters first: 1 - lr * weight_decay if decoupled, else 1
  double l2;     // times the parameter, added to the gradient: weight_decay if not decoupled, else 0
  double eps;
  double is_rectified;
  double step_size;  // lr / bias_correction1, times the rectification and sqrt(bias_correction2) if rectified

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE RadamArgs make(const Hypers& hyper, double step) {
    const bool decoupled = hyper.decoupled_weight_decay != 0;
    RadamArgs args;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.decay = decoupled ? 1 - hyper.lr * hyper.weight_decay : 1;
    args.l2 = decoupled ? 0 : hyper.weight_decay;
    args.eps = hyper.eps;
    const double beta2_power = power(args.beta2, step), bias_correction2 = 1 - beta2_power;
    // Lengths of the simple moving average: the maximum, and the approximation at this step.
    const double rho_inf = 2 / (1 - args.beta2) - 1;
    const double rho = rho_inf - 2 * step * beta2_power / bias_correction2;
    args.is_rectified = rho > 5;
    args.step_size = hyper.lr / (1 - power(args.beta1, step));
    if (rho > 5) {
      const double rectification = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho);
      args.step_size *= sqrt(rectification) * sqrt(bias_correction2);
    }
    return args;
  }
};

template <class T>
struct Radam {
  using Args = RadamArgs;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T beta2, one_minus_beta1, one_minus_beta2, sign, decay, l2, eps, step_size;
  bool is_rectified;

  DT_HOST_DEVICE explicit Radam(const Args& a)
      : beta2(T(a.beta2)),
        one_minus_beta1(T(1 - a.beta1)),
        one_minus_beta2(T(1 - a.beta2)),
        sign(T(a.sign)),
        decay(T(a.decay)),
        l2(T(a.l2)),
        eps(T(a.eps)),
        step_size(T(a.step_size)),
        is_rectified(a.is_rectified != 0) {}

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    V& exp_avg_sq = state[1];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    param = param * decay;
    exp_avg = interpolated(exp_avg, grad, V(one_minus_beta1));
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad);
    const V denominator = is_rectified ? square_root(exp_avg_sq) + eps : V(1);
    param = param - step_size * (exp_avg / denominator);
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
