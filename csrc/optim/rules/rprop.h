// Implements Rprop's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

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
