// Implements Adafactor's arithmetic. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// Adafactor (Shazeer & Stern 2018, alg. 4 and 5, as in torch). Vectors keep a second moment per element. Matrices keep
// it factored (adafactor_pass.h); separate passes before this rule set its state to 1 / sqrt(second moment).
struct AdafactorArgs {
  double sign;
  double fresh;  // weight of the newest gradient in second moments: step ** beta2_decay
  double eps1, eps2, d;
  double decay;      // 1 - lr * weight_decay
  double step_size;  // min(lr, 1 / sqrt(step)), times adapt()'s factor
  double is_matrix;

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE AdafactorArgs make(const Hypers& hyper, double step) {
    AdafactorArgs args;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.fresh = real_power(step, hyper.beta2_decay);
    args.eps1 = hyper.eps1;
    args.eps2 = hyper.eps2;
    args.d = hyper.d;
    args.decay = 1 - hyper.lr * hyper.weight_decay;
    args.step_size = fmin(hyper.lr, 1 / sqrt(step));
    args.is_matrix = 0;
    return args;
  }

  DT_HOST_DEVICE void fit(int64_t, int64_t) { is_matrix = 1; }

  DT_HOST_DEVICE void adapt(const TrustRatioSums& sums, int64_t numel) {
    const double param_size = sqrt(sums.param / numel), size = sqrt(sums.direction / numel) / d;
    // As Python's max in torch, which takes the bound where a norm is NaN: one such element leaves the others alone.
    step_size *= (param_size > eps2 ? param_size : eps2) / (size > 1 ? size : 1);
  }
};

template <class T>
struct Adafactor {
  using Args = AdafactorArgs;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {true};
  static constexpr bool kFactorsMatrices = true;
  T sign, fresh, floor, most, decay, step_size;
  bool is_matrix;

  DT_HOST_DEVICE explicit Adafactor(const Args& a)
      : sign(T(a.sign)),
        fresh(T(a.fresh)),
        floor(T(a.eps1 * a.eps1)),
        most(T(1 / a.eps1)),
        decay(T(a.decay)),
        step_size(T(a.step_size)),
        is_matrix(a.is_matrix != 0) {}

  DT_HOST_DEVICE T direction(T, T grad, T (&state)[kMaxStates]) const {
    if (is_matrix) return sign * grad * minimum(state[0], most);
    T& variance = state[0];
    variance = interpolated(variance, grad * grad, fresh);
    return sign * grad / square_root(maximum(variance, floor));
  }

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    param = param * decay - step_size * direction(param, grad, state);
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
