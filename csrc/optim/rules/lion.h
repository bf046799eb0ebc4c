// Implements Lion's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// Lion (Chen et al. 2023, alg. 2).
struct LionArgs {
  double lr, beta1, beta2, sign;
  double decay;  // 1 - lr * weight_decay

  static constexpr bool kCountsSteps = false;
  static DT_HOST_DEVICE LionArgs make(const Hypers& hyper, double) {
    LionArgs args;
    args.lr = hyper.lr;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.decay = 1 - args.lr * hyper.weight_decay;
    return args;
  }
};

template <class T>
struct Lion {
  using Args = LionArgs;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {};
  T lr, beta1, beta2, one_minus_beta1, one_minus_beta2, sign, decay;

  DT_HOST_DEVICE explicit Lion(const Args& a)
      : lr(T(a.lr)),
        beta1(T(a.beta1)),
        beta2(T(a.beta2)),
        one_minus_beta1(T(1 - a.beta1)),
        one_minus_beta2(T(1 - a.beta2)),
        sign(T(a.sign)),
        decay(T(a.decay)) {}

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    grad = sign * grad;
    param = param * decay - lr * sign_of(beta1 * exp_avg + one_minus_beta1 * grad);
    exp_avg = beta2 * exp_avg + one_minus_beta2 * grad;
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
