// Implements Adamax's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// Adamax (Kingma & Ba 2015, alg. 2), with eps in the maximum as in torch.
struct AdamaxArgs {
  double beta1, beta2, eps, l2, sign;
  double step_size;  // lr / bias_correction1

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE AdamaxArgs make(const Hypers& hyper, double step) {
    AdamaxArgs args;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.eps = hyper.eps;
    args.l2 = hyper.weight_decay;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.step_size = hyper.lr / (1 - power(args.beta1, step));
    return args;
  }
};

template <class T>
struct Adamax {
  using Args = AdamaxArgs;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};  // a norm is never negative, and the step divides by it
  T beta2, one_minus_beta1, eps, l2, sign, step_size;

  DT_HOST_DEVICE explicit Adamax(const Args& a)
      : beta2(T(a.beta2)),
        one_minus_beta1(T(1 - a.beta1)),
        eps(T(a.eps)),
        l2(T(a.l2)),
        sign(T(a.sign)),
        step_size(T(a.step_size)) {}

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

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
