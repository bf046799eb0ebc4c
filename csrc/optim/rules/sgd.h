// Implements SGD's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// SGD as torch.optim.SGD: momentum (heavy ball), dampening, Nesterov, L2 weight decay.
struct SgdArgs {
  double lr, l2, sign, momentum;
  double gradient_share;  // 1 - dampening, but 1 on a parameter's first step, when the buffer starts as the gradient
  double nesterov;

  // `step` is 1 on a parameter's first step, and more later.
  static constexpr bool kCountsSteps = false;
  static DT_HOST_DEVICE SgdArgs make(const Hypers& hyper, double step) {
    SgdArgs args;
    args.lr = hyper.lr;
    args.l2 = hyper.weight_decay;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.momentum = hyper.momentum;
    args.gradient_share = step > 1 ? 1 - hyper.dampening : 1;
    args.nesterov = hyper.nesterov;
    return args;
  }
};

template <class T, bool kMomentum>
struct SgdRule {
  using Args = SgdArgs;
  static constexpr int kNumStates = kMomentum ? 1 : 0;
  static constexpr bool kSquared[kMaxStates] = {};
  T lr, l2, sign, momentum, gradient_share;
  bool nesterov;

  DT_HOST_DEVICE explicit SgdRule(const Args& a)
      : lr(T(a.lr)),
        l2(T(a.l2)),
        sign(T(a.sign)),
        momentum(T(a.momentum)),
        gradient_share(T(a.gradient_share)),
        nesterov(a.nesterov != 0) {}

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    if constexpr (kMomentum) {
      V& buffer = state[0];
      buffer = momentum * buffer + gradient_share * grad;
      grad = nesterov ? grad + momentum * buffer : buffer;
    }
    param = param - lr * grad;
  }
};
template <class T>
using Sgd = SgdRule<T, false>;
template <class T>
using SgdMomentum = SgdRule<T, true>;

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
