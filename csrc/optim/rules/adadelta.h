// Implements Adadelta's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// Adadelta (Zeiler 2012, alg. 1), with torch's learning rate.
struct AdadeltaArgs {
  double lr, rho, eps, l2, sign;

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE AdadeltaArgs make(const Hypers& hyper, double) {
    AdadeltaArgs args;
    args.lr = hyper.lr;
    args.rho = hyper.rho;
    args.eps = hyper.eps;
    args.l2 = hyper.weight_decay;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    return args;
  }
};

template <class T>
struct Adadelta {
  using Args = AdadeltaArgs;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {true, true};
  T lr, rho, one_minus_rho, eps, l2, sign;

  DT_HOST_DEVICE explicit Adadelta(const Args& a)
      : lr(T(a.lr)), rho(T(a.rho)), one_minus_rho(T(1 - a.rho)), eps(T(a.eps)), l2(T(a.l2)), sign(T(a.sign)) {}

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& square_avg = state[0];
    V& acc_delta = state[1];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    square_avg = rho * square_avg + one_minus_rho * (grad * grad);
    const V delta = square_root(acc_delta + eps) / square_root(square_avg + eps) * grad;
    acc_delta = rho * acc_delta + one_minus_rho * (delta * delta);
    param = param - lr * delta;
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
