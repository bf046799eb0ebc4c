// Implements the arithmetic of Adagrad, Adadelta and RMSprop. Host and device; needs no torch header.
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

// RMSprop (Tieleman & Hinton 2012, lecture 6.5; centered after Graves 2013, eq. 38 to 41), with torch's momentum.
template <class T, bool kCentered, bool kMomentum>
struct RmspropRule {
  using Args = RmspropRule<double, kCentered, kMomentum>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 1 + kCentered + kMomentum;
  static constexpr bool kSquared[kMaxStates] = {true};
  T lr, alpha, one_minus_alpha, eps, l2, sign, momentum;

  static DT_HOST_DEVICE RmspropRule make(const Hypers& hyper, double) {
    RmspropRule rule;
    rule.lr = hyper.lr;
    rule.alpha = hyper.alpha;
    rule.one_minus_alpha = 1 - hyper.alpha;
    rule.eps = hyper.eps;
    rule.l2 = hyper.weight_decay;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.momentum = hyper.momentum;
    return rule;
  }

  template <class V>
  DT_HOST_DEVICE void operator()(V& param, V grad, V (&state)[kMaxStates]) const {
    V& square_avg = state[0];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    square_avg = alpha * square_avg + one_minus_alpha * (grad * grad);
    V variance = square_avg;
    if constexpr (kCentered) {
      V& grad_avg = state[1];
      grad_avg = grad_avg + one_minus_alpha * (grad - grad_avg);
      variance = variance - grad_avg * grad_avg;
    }
    V update = grad / (square_root(variance) + eps);
    if constexpr (kMomentum) {
      V& buffer = state[1 + kCentered];
      update = buffer = momentum * buffer + update;
    }
    param = param - lr * update;
  }
};
template <class T>
using Rmsprop = RmspropRule<T, false, false>;
template <class T>
using RmspropMomentum = RmspropRule<T, false, true>;
template <class T>
using RmspropCentered = RmspropRule<T, true, false>;
template <class T>
using RmspropCenteredMomentum = RmspropRule<T, true, true>;

DT_END_ISA

}  // namespace drivetrain::optim
