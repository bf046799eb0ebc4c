// Implements Adagrad's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// Adagrad (Duchi et al. 2011, the diagonal form of section 1.1), with torch's decay of the learning rate.
template <class T>
struct Adagrad {
  using Args = Adagrad<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {true};
  T sign, l2, eps;
  T step_size;  // lr / (1 + (step - 1) * lr_decay)

  static DT_HOST_DEVICE Adagrad make(const Hypers& hyper, double step) {
    Adagrad rule;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.l2 = hyper.weight_decay;
    rule.eps = hyper.eps;
    rule.step_size = hyper.lr / (1 + (step - 1) * hyper.lr_decay);
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& sum = state[0];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    sum = sum + grad * grad;
    param = param - step_size * (grad / (square_root(sum) + eps));
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
