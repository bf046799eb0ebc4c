// Implements SGD's arithmetic. Host and device; needs no torch header.
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

DT_END_ISA

}  // namespace drivetrain::optim
