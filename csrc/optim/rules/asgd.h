// Implements ASGD's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// ASGD (Polyak & Juditsky 1992), with the step sizes of Bottou's SGD as torch has them. The step size and the weight of
// the average lag one step behind: a step uses the values that the step before has computed.
struct AsgdArgs {
  double sign, l2;
  double eta;    // step size
  double decay;  // 1 - lambd * eta
  double mu;     // weight of the newest parameter in the average

  static constexpr bool kCountsSteps = true;
  static constexpr int kNumScalars = 2;
  static constexpr const char* kScalarNames[] = {"eta", "mu"};

  static DT_HOST_DEVICE void advance(const Hypers& hyper, double step, Scalars& scalars) {
    set_scalar(scalars, 0, hyper.lr / real_power(1 + hyper.lambd * hyper.lr * step, hyper.average_decay));
    set_scalar(scalars, 1, 1 / fmax(1.0, step - hyper.t0));
  }

  static DT_HOST_DEVICE AsgdArgs make(const Hypers& hyper, double, const Scalars& scalars) {
    AsgdArgs args;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.l2 = hyper.weight_decay;
    args.eta = scalars.value[0];
    args.decay = 1 - hyper.lambd * args.eta;
    args.mu = scalars.value[1];
    return args;
  }
};

template <class T>
struct Asgd {
  using Args = AsgdArgs;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {};
  T sign, l2, eta, decay, mu;

  DT_HOST_DEVICE explicit Asgd(const Args& a)
      : sign(T(a.sign)), l2(T(a.l2)), eta(T(a.eta)), decay(T(a.decay)), mu(T(a.mu)) {}

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& average = state[0];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    param = param * decay - eta * grad;
    average = mu == 1 ? param : average + mu * (param - average);
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
