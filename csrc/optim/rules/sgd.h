// Implements the arithmetic of SGD, ASGD and Rprop. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// SGD as torch.optim.SGD: momentum (heavy ball), dampening, Nesterov, L2 weight decay.
template <class T, bool kMomentum>
struct SgdRule {
  using Args = SgdRule<double, kMomentum>;
  static constexpr bool kCountsSteps = false;
  static constexpr int kNumStates = kMomentum ? 1 : 0;
  static constexpr bool kSquared[kMaxStates] = {};
  T lr, l2, sign, momentum;
  T gradient_share;  // 1 - dampening, but 1 on a parameter's first step, when the buffer starts as the gradient
  T nesterov;

  // `step` is 1 on a parameter's first step, and more later.
  static DT_HOST_DEVICE SgdRule make(const Hypers& hyper, double step) {
    SgdRule rule;
    rule.lr = hyper.lr;
    rule.l2 = hyper.weight_decay;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.momentum = hyper.momentum;
    rule.gradient_share = step > 1 ? 1 - hyper.dampening : 1;
    rule.nesterov = hyper.nesterov;
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    if constexpr (kMomentum) {
      V& buffer = state[0];
      buffer = momentum * buffer + gradient_share * grad;
      grad = nesterov != 0 ? grad + momentum * buffer : buffer;
    }
    param = param - lr * grad;
  }
};
template <class T>
using Sgd = SgdRule<T, false>;
template <class T>
using SgdMomentum = SgdRule<T, true>;

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

// Rprop (Riedmiller & Braun 1993; the variant iRprop- of Igel & Huesken 2000), as in torch.
template <class T>
struct Rprop {
  using Args = Rprop<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};  // a step size is never negative
  T sign, eta_minus, eta_plus, step_size_min, step_size_max;

  static DT_HOST_DEVICE Rprop make(const Hypers& hyper, double) {
    Rprop rule;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.eta_minus = hyper.eta_minus;
    rule.eta_plus = hyper.eta_plus;
    rule.step_size_min = hyper.step_size_min;
    rule.step_size_max = hyper.step_size_max;
    return rule;
  }

  // As torch.sign, which returns 0 for NaN: such a gradient moves nothing.
  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& prev = state[0];
    V& step_size = state[1];
    grad = sign * grad;
    const V agreement = grad * prev;
    const V factor = agreement > V(0) ? V(eta_plus) : agreement < V(0) ? V(eta_minus) : V(1);
    step_size = minimum(maximum(step_size * factor, V(step_size_min)), V(step_size_max));
    if (agreement < V(0)) grad = V(0);
    const V direction = grad > V(0) ? V(1) : grad < V(0) ? V(-1) : V(0);
    param = param - direction * step_size;
    prev = grad;
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
