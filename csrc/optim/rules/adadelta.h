// Implements Adadelta's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// Adadelta (Zeiler 2012, alg. 1), with torch's learning rate.
template <class T>
struct Adadelta {
  using Args = Adadelta<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {true, true};
  T lr, rho, one_minus_rho, eps, l2, sign;

  static DT_HOST_DEVICE Adadelta make(const Hypers& hyper, double) {
    Adadelta rule;
    rule.lr = hyper.lr;
    rule.rho = hyper.rho;
    rule.one_minus_rho = 1 - hyper.rho;
    rule.eps = hyper.eps;
    rule.l2 = hyper.weight_decay;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    return rule;
  }

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

DT_END_ISA

}  // namespace drivetrain::optim
