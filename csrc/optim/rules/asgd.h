// Implements ASGD's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// ASGD (Polyak & Juditsky 1992), with the step sizes of Bottou's SGD as torch has them. The step size and the weight of
// the average lag one step behind: a step uses the values that the step before has computed.
template <class T>
struct Asgd {
  using Args = Asgd<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumScalars = 2;
  static constexpr const char* kScalarNames[] = {"eta", "mu"};
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {};
  T sign, l2;
  T eta;    // step size
  T decay;  // 1 - lambd * eta
  T mu;     // weight of the newest parameter in the average

  static DT_HOST_DEVICE void advance(const Hypers& hyper, double step, Scalars& scalars) {
    set_scalar(scalars, 0, hyper.lr / real_power(1 + hyper.lambd * hyper.lr * step, hyper.average_decay));
    set_scalar(scalars, 1, 1 / fmax(1.0, step - hyper.t0));
  }

  static DT_HOST_DEVICE Asgd make(const Hypers& hyper, double, const Scalars& scalars) {
    Asgd rule;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.l2 = hyper.weight_decay;
    rule.eta = scalars.value[0];
    rule.decay = 1 - hyper.lambd * scalars.value[0];
    rule.mu = scalars.value[1];
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& average = state[0];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    param = param * decay - eta * grad;
    average = mu == 1 ? param : average + mu * (param - average);
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
