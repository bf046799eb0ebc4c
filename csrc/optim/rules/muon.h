// Implements Muon's arithmetic around its matrix products. Host and device; needs no torch header.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "optim/rules/arithmetic.h"
#include "optim/rules/hypers.h"

namespace drivetrain::optim {

DT_BEGIN_ISA

// Muon (Jordan et al. 2024, as in torch): a momentum, an iteration over matrices (muon.cpp), and a step along its
// result. Two rules share the numbers: the first writes the momentum where the second reads its gradient.
template <class T>
struct MuonNumbers {
  static constexpr bool kCountsSteps = false;
  T momentum, one_minus_momentum, nesterov;
  T decay;      // 1 - lr * weight_decay
  T step_size;  // lr, times fit()'s factor for the matrix's shape
  T matches_rms_adamw;
  T coefficients[3];
  T iterations, eps;
  T num_heads;      // equal groups of rows that are orthogonalized one by one
  T polar_express;  // in place of the coefficients
  T beta2;          // of the mean squares of rows; only of a rule that keeps them

  static DT_HOST_DEVICE MuonNumbers make(const Hypers& hyper, double) {
    MuonNumbers rule;
    rule.momentum = hyper.momentum;
    rule.one_minus_momentum = 1 - hyper.momentum;
    rule.nesterov = hyper.nesterov;
    rule.decay = 1 - hyper.lr * hyper.weight_decay;
    rule.step_size = hyper.lr;
    rule.matches_rms_adamw = hyper.match_rms_adamw;
    rule.coefficients[0] = hyper.ns_a;
    rule.coefficients[1] = hyper.ns_b;
    rule.coefficients[2] = hyper.ns_c;
    rule.iterations = hyper.ns_steps;
    rule.eps = hyper.eps;
    rule.num_heads = hyper.num_heads;
    rule.polar_express = hyper.polar_express;
    rule.beta2 = hyper.beta2;
    return rule;
  }

  // Applies torch.optim.Muon's learning rates: Jordan's, or the rates of Liu et al. 2025 (section 2.2), which match
  // AdamW's updates.
  DT_HOST_DEVICE void fit(int64_t of_rows, int64_t of_columns) {
    const double rows = static_cast<double>(of_rows) / num_heads, columns = static_cast<double>(of_columns);
    step_size *= matches_rms_adamw != 0 ? 0.2 * sqrt(maximum(rows, columns)) : sqrt(maximum(1.0, rows / columns));
  }

  // Returns the arguments of the iteration, which matrices of one batch share.
  std::array<T, 7> iteration() const {
    return {coefficients[0], coefficients[1], coefficients[2], iterations, eps, num_heads, polar_express};
  }
};
using MuonArgs = MuonNumbers<double>;

template <class T>
struct MuonMomentum : MuonNumbers<T> {
  using Args = MuonArgs;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {};
  static constexpr bool kNeedsMatrices = true;

  DT_HOST_DEVICE void operator()(T& result, T grad, T (&state)[kMaxStates]) const {
    T& buffer = state[0];
    buffer = buffer + this->one_minus_momentum * (grad - buffer);
    result = this->nesterov != 0 ? grad + this->momentum * (buffer - grad) : buffer;
  }
};

template <class T>
struct MuonStep : MuonNumbers<T> {
  using Args = MuonArgs;
  static constexpr int kNumStates = 0;
  static constexpr bool kSquared[kMaxStates] = {};

  DT_HOST_DEVICE void operator()(T& param, T orthogonal, T (&)[kMaxStates]) const {
    param = param * this->decay - this->step_size * orthogonal;
  }
};

DT_END_ISA

}  // namespace drivetrain::optim
