// Implements Adafactor's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// Adafactor (Shazeer & Stern 2018, alg. 4 and 5, as in torch). Vectors keep a second moment per element. Matrices keep
// it factored (adafactor_pass.h); separate passes before this rule set its state to 1 / sqrt(second moment).
template <class T>
struct Adafactor {
  using Args = Adafactor<double>;
  static constexpr bool kCountsSteps = true;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {true};
  static constexpr bool kFactorsMatrices = true;
  T sign;
  T fresh;  // weight of the newest gradient in second moments: step ** beta2_decay
  T eps1, eps2, d, floor, most;
  T decay;      // 1 - lr * weight_decay
  T step_size;  // min(lr, 1 / sqrt(step)), times adapt()'s factor
  T is_matrix;

  static DT_HOST_DEVICE Adafactor make(const Hypers& hyper, double step) {
    Adafactor rule;
    rule.sign = hyper.maximize != 0 ? -1 : 1;
    rule.fresh = real_power(step, hyper.beta2_decay);
    rule.eps1 = hyper.eps1;
    rule.eps2 = hyper.eps2;
    rule.floor = hyper.eps1 * hyper.eps1;
    rule.most = 1 / hyper.eps1;
    rule.d = hyper.d;
    rule.decay = 1 - hyper.lr * hyper.weight_decay;
    rule.step_size = fmin(hyper.lr, 1 / sqrt(step));
    rule.is_matrix = 0;
    return rule;
  }

  DT_HOST_DEVICE void fit(int64_t, int64_t) { is_matrix = 1; }

  DT_HOST_DEVICE void adapt(const TrustRatioSums& sums, int64_t numel) {
    const double param_size = sqrt(sums.param / numel), size = sqrt(sums.direction / numel) / d;
    // As Python's max in torch, which takes the bound where a norm is NaN: one such element leaves the others alone.
    step_size *= (param_size > eps2 ? param_size : eps2) / (size > 1 ? size : 1);
  }

  DT_HOST_DEVICE T direction(T, T grad, T (&state)[kMaxStates]) const {
    if (is_matrix != 0) return sign * grad * minimum(state[0], most);
    T& variance = state[0];
    variance = interpolated(variance, grad * grad, fresh);
    return sign * grad / square_root(maximum(variance, floor));
  }

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    param = param * decay - step_size * direction(param, grad, state);
  }
};

using AdafactorArgs = Adafactor<double>;

DT_END_ISA

}  // namespace drivetrain::optim
