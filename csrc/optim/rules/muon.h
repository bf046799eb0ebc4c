// Implements Muon's arithmetic around its matrix products. Host and device; needs no torch header.
#pragma once

#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

// Muon (Jordan et al. 2024, as in torch): a momentum, an iteration over matrices (muon.cpp), and a step along its
// result. Two rules share the Args: the first writes the momentum where the second reads its gradient.
struct MuonArgs {
  double momentum, nesterov;
  double decay;      // 1 - lr * weight_decay
  double step_size;  // lr, times fit()'s factor for the matrix's shape
  double matches_rms_adamw;
  double coefficients[3];
  double iterations, eps;

  static constexpr bool kCountsSteps = false;
  static DT_HOST_DEVICE MuonArgs make(const Hypers& hyper, double) {
    MuonArgs args;
    args.momentum = hyper.momentum;
    args.nesterov = hyper.nesterov;
    args.decay = 1 - hyper.lr * hyper.weight_decay;
    args.step_size = hyper.lr;
    args.matches_rms_adamw = hyper.match_rms_adamw;
    args.coefficients[0] = hyper.ns_a;
    args.coefficients[1] = hyper.ns_b;
    args.coefficients[2] = hyper.ns_c;
    args.iterations = hyper.ns_steps;
    args.eps = hyper.eps;
    return args;
  }

  // Applies torch.optim.Muon's learning rates: Jordan's, or the rates of Liu et al. 2025 (section 2.2), which match
  // AdamW's updates.
  DT_HOST_DEVICE void fit(int64_t of_rows, int64_t of_columns) {
    const double rows = static_cast<double>(of_rows), columns = static_cast<double>(of_columns);
    step_size *= matches_rms_adamw != 0 ? 0.2 * sqrt(maximum(rows, columns)) : sqrt(maximum(1.0, rows / columns));
  }
};

template <class T>
struct MuonMomentum {
  using Args = MuonArgs;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {};
  static constexpr bool kNeedsMatrices = true;
  T momentum, one_minus_momentum;
  bool nesterov;

  DT_HOST_DEVICE explicit MuonMomentum(const Args& a)
      : momentum(T(a.momentum)), one_minus_momentum(T(1 - a.momentum)), nesterov(a.nesterov != 0) {}

  DT_HOST_DEVICE void operator()(T& result, T grad, T (&state)[kMaxStates]) const {
    T& buffer = state[0];
    buffer = buffer + one_minus_momentum * (grad - buffer);
    result = nesterov ? grad + momentum * (buffer - grad) : buffer;
  }
};

template <class T>
struct MuonStep {
  using Args = MuonArgs;
  static constexpr int kNumStates = 0;
  static constexpr bool kSquared[kMaxStates] = {};
  T decay, step_size;

  DT_HOST_DEVICE explicit MuonStep(const Args& a) : decay(T(a.decay)), step_size(T(a.step_size)) {}

  DT_HOST_DEVICE void operator()(T& param, T orthogonal, T (&)[kMaxStates]) const {
    param = param * decay - step_size * orthogonal;
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
