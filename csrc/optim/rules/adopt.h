// Implements ADOPT's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// ADOPT (Taniguchi et al. 2024, alg. 2): Adam with the second moment of the steps before in the denominator, and the
// mean taken after the division. The first step only starts the second moment.
struct AdoptArgs {
  double lr, beta1, beta2, eps, sign;
  double decay;  // multiplies parameters first: 1 - lr * weight_decay if decoupled, else 1
  double l2;     // times the parameter, added to the gradient: weight_decay if not decoupled, else 0
  double clip;   // largest magnitude of a normalized gradient
  double is_first;

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE AdoptArgs make(const Hypers& hyper, double step) {
    const bool decoupled = hyper.decoupled_weight_decay != 0;
    AdoptArgs args;
    args.lr = hyper.lr;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.eps = hyper.eps;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.decay = decoupled ? 1 - hyper.lr * hyper.weight_decay : 1;
    args.l2 = decoupled ? 0 : hyper.weight_decay;
    args.is_first = step <= 1;
    // The fourth root of the number of steps done.
    args.clip = hyper.clips != 0 ? sqrt(sqrt(fmax(1.0, step - 1))) : INFINITY;
    return args;
  }
};

template <class T>
struct Adopt {
  using Args = AdoptArgs;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T lr, one_minus_beta1, beta2, one_minus_beta2, eps, sign, decay, l2, clip;
  bool is_first;

  DT_HOST_DEVICE explicit Adopt(const Args& a)
      : lr(T(a.lr)),
        one_minus_beta1(T(1 - a.beta1)),
        beta2(T(a.beta2)),
        one_minus_beta2(T(1 - a.beta2)),
        eps(T(a.eps)),
        sign(T(a.sign)),
        decay(T(a.decay)),
        l2(T(a.l2)),
        clip(T(a.clip)),
        is_first(a.is_first != 0) {}

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& exp_avg = state[0];
    V& exp_avg_sq = state[1];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    const V normalized = grad / maximum(square_root(exp_avg_sq), V(eps));
    const V clipped = minimum(maximum(normalized, V(-clip)), V(clip));
    const V mean = exp_avg + one_minus_beta1 * (clipped - exp_avg);
    exp_avg = is_first ? exp_avg : mean;
    param = is_first ? param : param * decay - lr * mean;
    exp_avg_sq = is_first ? grad * grad : beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad);
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
