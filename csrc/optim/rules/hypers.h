// Declares the numbers that rules read: hyper-parameters, sums, and scalars of the state. Needs no torch header.
#pragma once

#include <cmath>

#include "formats/storage.h"

namespace drivetrain::optim {

using namespace formats;

constexpr int kMaxStates = 4;

// Sums over a whole parameter: the squares of its elements, and of its direction's.
struct TrustRatioSums {
  double param = 0, direction = 0;
};

// A step's hyper-parameters by torch's names, as the Python class passes them; NaN for those that it omits.
#define DT_HYPERS(X)        \
  X(lr)                     \
  X(weight_decay)           \
  X(decoupled_weight_decay) \
  X(maximize)               \
  X(eps)                    \
  X(beta1)                  \
  X(beta2)                  \
  X(beta3)                  \
  X(momentum)               \
  X(dampening)              \
  X(nesterov)               \
  X(lr_decay)               \
  X(alpha)                  \
  X(grad_averaging)         \
  X(bias_correction)        \
  X(always_adapt)           \
  X(trust_clip)             \
  X(eps1)                   \
  X(eps2)                   \
  X(d)                      \
  X(beta2_decay)            \
  X(match_rms_adamw)        \
  X(ns_a)                   \
  X(ns_b)                   \
  X(ns_c)                   \
  X(ns_steps)               \
  X(num_heads)              \
  X(polar_express)          \
  X(rho)                    \
  X(momentum_decay)         \
  X(lambd)                  \
  X(average_decay)          \
  X(t0)                     \
  X(eta_minus)              \
  X(eta_plus)               \
  X(step_size_min)          \
  X(step_size_max)          \
  X(clips)                  \
  X(warmup_steps)           \
  X(r)                      \
  X(weight_lr_power)        \
  X(no_prox)

struct Hypers {
#define DT_FIELD(name) double name = NAN;
  DT_HYPERS(DT_FIELD)
#undef DT_FIELD
};

DT_BEGIN_ISA

// Return what multiplies parameters before a step, and what is added to the gradient per unit of the parameter. Weight
// decay is either decoupled from the gradient or a part of it.
DT_HOST_DEVICE double decay_of(const Hypers& hyper) {
  return hyper.decoupled_weight_decay != 0 ? 1 - hyper.lr * hyper.weight_decay : 1;
}
DT_HOST_DEVICE double l2_of(const Hypers& hyper) { return hyper.decoupled_weight_decay != 0 ? 0 : hyper.weight_decay; }

DT_END_ISA

constexpr int kMaxScalars = 2;

// A parameter's numbers that some rules keep between steps besides the step counter. As in torch's classes, they are
// state tensors of one element, of float32 or float64.
struct Scalars {
  double value[kMaxScalars] = {};
  bool is_double[kMaxScalars] = {};

  bool operator==(const Scalars&) const = default;
};

}  // namespace drivetrain::optim
