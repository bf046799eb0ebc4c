// Implements Adagrad's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// Adagrad (Duchi et al. 2011, the diagonal form of section 1.1), with torch's decay of the learning rate.
struct AdagradArgs {
  double sign, l2, eps;
  double step_size;  // lr / (1 + (step - 1) * lr_decay)

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE AdagradArgs make(const Hypers& hyper, double step) {
    AdagradArgs args;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.l2 = hyper.weight_decay;
    args.eps = hyper.eps;
    args.step_size = hyper.lr / (1 + (step - 1) * hyper.lr_decay);
    return args;
  }
};

template <class T>
struct Adagrad {
  using Args = AdagradArgs;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {true};
  T sign, l2, eps, step_size;

  DT_HOST_DEVICE explicit Adagrad(const Args& a)
      : sign(T(a.sign)), l2(T(a.l2)), eps(T(a.eps)), step_size(T(a.step_size)) {}

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& sum = state[0];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    sum = sum + grad * grad;
    param = param - step_size * (grad / (square_root(sum) + eps));
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
