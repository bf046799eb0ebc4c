// The optimizers' arithmetic: one small struct per rule, on values that are already loaded. Host and device; no torch.
//
// A rule is a plain-data Args (made once per step, on the host, in double, so that CPU and GPU share every scalar)
// and a template <class T> whose operator() updates one element; kSquared says which of its states are means or sums of
// squares, of which 8 bits keep the root. A new element-wise optimizer is one such pair and one
// row in DT_OPTIM_RULES, which names its states as torch's class does.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "optim/storage.h"

namespace drivetrain::optim {

constexpr int kMaxStates = 3;

// A step's hyper-parameters by torch's names, as the Python class gives them.
struct Hypers {
  virtual double operator[](const char* name) const = 0;  // throws if the class did not give it

 protected:
  ~Hypers() = default;
};

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

DT_HOST_DEVICE float square_root(float x) { return sqrtf(x); }
DT_HOST_DEVICE double square_root(double x) { return sqrt(x); }

// -1, 0 or 1; a NaN stays one.
template <class T>
DT_HOST_DEVICE T sign_of(T x) {
  return x > 0 ? T(1) : x < 0 ? T(-1) : x;
}

// max that keeps a NaN, as torch.maximum does.
template <class T>
DT_HOST_DEVICE T maximum(T a, T b) {
  return a != a || a > b ? a : b;
}

// ---- Adam and AdamW (Kingma & Ba 2015, alg. 1; Loshchilov & Hutter 2019, alg. 2). The step
//   lr / bias_correction1 * exp_avg / (sqrt(exp_avg_sq) / sqrt(bias_correction2) + eps)
// is multiplied out with sqrt(bias_correction2), as section 2 of the first paper suggests: one division per element
// instead of two, which is what keeps the loop at the speed of memory.
struct AdamArgs {
  double beta1, beta2;
  double sign;       // -1 to maximize, else 1
  double decay;      // parameters are multiplied by it first: 1 - lr * weight_decay if decoupled, else 1
  double l2;         // added to the gradient, times the parameter: weight_decay if not decoupled, else 0
  double step_size;  // lr / bias_correction1 * sqrt(bias_correction2)
  double eps;        // eps * sqrt(bias_correction2)

  // step counts from 1.
  static constexpr bool kCountsSteps = true;
  static AdamArgs make(const Hypers& hyper, double step) {
    const double lr = hyper["lr"], weight_decay = hyper["weight_decay"];
    const bool decoupled = hyper["decoupled_weight_decay"] != 0;
    AdamArgs args;
    args.beta1 = hyper["beta1"];
    args.beta2 = hyper["beta2"];
    args.sign = hyper["maximize"] != 0 ? -1 : 1;
    args.decay = decoupled ? 1 - lr * weight_decay : 1;
    args.l2 = decoupled ? 0 : weight_decay;
    const double bias_correction2_sqrt = std::sqrt(1 - std::pow(args.beta2, step));
    args.step_size = lr / (1 - std::pow(args.beta1, step)) * bias_correction2_sqrt;
    args.eps = hyper["eps"] * bias_correction2_sqrt;
    return args;
  }
};

template <class T, bool kAmsgrad>
struct AdamRule {
  using Args = AdamArgs;
  static constexpr int kNumStates = kAmsgrad ? 3 : 2;
  static constexpr bool kSquared[kMaxStates] = {false, true, true};
  T beta1, beta2, one_minus_beta1, one_minus_beta2, sign, decay, l2, step_size, eps;

  DT_HOST_DEVICE explicit AdamRule(const Args& a)
      : beta1(T(a.beta1)),
        beta2(T(a.beta2)),
        one_minus_beta1(T(1 - a.beta1)),
        one_minus_beta2(T(1 - a.beta2)),
        sign(T(a.sign)),
        decay(T(a.decay)),
        l2(T(a.l2)),
        step_size(T(a.step_size)),
        eps(T(a.eps)) {}

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    T& exp_avg = state[0];
    T& exp_avg_sq = state[1];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    param = param * decay;
    exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad);
    T second_moment = exp_avg_sq;
    if constexpr (kAmsgrad) second_moment = state[2] = maximum(state[2], exp_avg_sq);
    param = param - step_size * (exp_avg / (square_root(second_moment) + eps));
  }
};
template <class T>
using Adam = AdamRule<T, false>;
template <class T>
using AdamAmsgrad = AdamRule<T, true>;

// ---- SGD, as torch.optim.SGD: momentum (heavy ball), dampening, Nesterov, L2 weight decay.
struct SgdArgs {
  double lr, l2, sign, momentum;
  double gradient_share;  // 1 - dampening, but 1 on a parameter's first step, when the buffer starts as the gradient
  double nesterov;

  // step: 1 on a parameter's first step, more after it.
  static constexpr bool kCountsSteps = false;
  static SgdArgs make(const Hypers& hyper, double step) {
    SgdArgs args;
    args.lr = hyper["lr"];
    args.l2 = hyper["weight_decay"];
    args.sign = hyper["maximize"] != 0 ? -1 : 1;
    args.momentum = hyper["momentum"];
    args.gradient_share = step > 1 ? 1 - hyper["dampening"] : 1;
    args.nesterov = hyper["nesterov"];
    return args;
  }
};

template <class T, bool kMomentum>
struct SgdRule {
  using Args = SgdArgs;
  static constexpr int kNumStates = kMomentum ? 1 : 0;
  static constexpr bool kSquared[kMaxStates] = {};
  T lr, l2, sign, momentum, gradient_share;
  bool nesterov;

  DT_HOST_DEVICE explicit SgdRule(const Args& a)
      : lr(T(a.lr)),
        l2(T(a.l2)),
        sign(T(a.sign)),
        momentum(T(a.momentum)),
        gradient_share(T(a.gradient_share)),
        nesterov(a.nesterov != 0) {}

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    if constexpr (kMomentum) {
      T& buffer = state[0];
      buffer = momentum * buffer + gradient_share * grad;
      grad = nesterov ? grad + momentum * buffer : buffer;
    }
    param = param - lr * grad;
  }
};
template <class T>
using Sgd = SgdRule<T, false>;
template <class T>
using SgdMomentum = SgdRule<T, true>;

// ---- Adagrad (Duchi et al. 2011, the diagonal form of section 1.1), with torch's decay of the learning rate.
struct AdagradArgs {
  double sign, l2, eps;
  double step_size;  // lr / (1 + (step - 1) * lr_decay)

  static constexpr bool kCountsSteps = true;
  static AdagradArgs make(const Hypers& hyper, double step) {
    AdagradArgs args;
    args.sign = hyper["maximize"] != 0 ? -1 : 1;
    args.l2 = hyper["weight_decay"];
    args.eps = hyper["eps"];
    args.step_size = hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"]);
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

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    T& sum = state[0];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    sum = sum + grad * grad;
    param = param - step_size * (grad / (square_root(sum) + eps));
  }
};

// ---- RMSprop (Tieleman & Hinton 2012, lecture 6.5; centered after Graves 2013, eq. 38 to 41), with torch's momentum.
struct RmspropArgs {
  double lr, alpha, eps, l2, sign, momentum;

  static constexpr bool kCountsSteps = true;
  static RmspropArgs make(const Hypers& hyper, double) {
    RmspropArgs args;
    args.lr = hyper["lr"];
    args.alpha = hyper["alpha"];
    args.eps = hyper["eps"];
    args.l2 = hyper["weight_decay"];
    args.sign = hyper["maximize"] != 0 ? -1 : 1;
    args.momentum = hyper["momentum"];
    return args;
  }
};

template <class T, bool kCentered, bool kMomentum>
struct RmspropRule {
  using Args = RmspropArgs;
  static constexpr int kNumStates = 1 + kCentered + kMomentum;
  static constexpr bool kSquared[kMaxStates] = {true};
  T lr, alpha, one_minus_alpha, eps, l2, sign, momentum;

  DT_HOST_DEVICE explicit RmspropRule(const Args& a)
      : lr(T(a.lr)),
        alpha(T(a.alpha)),
        one_minus_alpha(T(1 - a.alpha)),
        eps(T(a.eps)),
        l2(T(a.l2)),
        sign(T(a.sign)),
        momentum(T(a.momentum)) {}

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    T& square_avg = state[0];
    grad = sign * grad;
    if (l2 != 0) grad = grad + l2 * param;
    square_avg = alpha * square_avg + one_minus_alpha * (grad * grad);
    T variance = square_avg;
    if constexpr (kCentered) {
      T& grad_avg = state[1];
      grad_avg = grad_avg + one_minus_alpha * (grad - grad_avg);
      variance = variance - grad_avg * grad_avg;
    }
    T update = grad / (square_root(variance) + eps);
    if constexpr (kMomentum) {
      T& buffer = state[1 + kCentered];
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

// ---- Lion (Chen et al. 2023, alg. 2).
struct LionArgs {
  double lr, beta1, beta2, sign;
  double decay;  // 1 - lr * weight_decay

  static constexpr bool kCountsSteps = false;
  static LionArgs make(const Hypers& hyper, double) {
    LionArgs args;
    args.lr = hyper["lr"];
    args.beta1 = hyper["beta1"];
    args.beta2 = hyper["beta2"];
    args.sign = hyper["maximize"] != 0 ? -1 : 1;
    args.decay = 1 - args.lr * hyper["weight_decay"];
    return args;
  }
};

template <class T>
struct Lion {
  using Args = LionArgs;
  static constexpr int kNumStates = 1;
  static constexpr bool kSquared[kMaxStates] = {};
  T lr, beta1, beta2, one_minus_beta1, one_minus_beta2, sign, decay;

  DT_HOST_DEVICE explicit Lion(const Args& a)
      : lr(T(a.lr)),
        beta1(T(a.beta1)),
        beta2(T(a.beta2)),
        one_minus_beta1(T(1 - a.beta1)),
        one_minus_beta2(T(1 - a.beta2)),
        sign(T(a.sign)),
        decay(T(a.decay)) {}

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    T& exp_avg = state[0];
    grad = sign * grad;
    param = param * decay - lr * sign_of(beta1 * exp_avg + one_minus_beta1 * grad);
    exp_avg = beta2 * exp_avg + one_minus_beta2 * grad;
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

// ---- The table of rules: X(template, name in Python, names of its states in Python).
#define DT_OPTIM_RULES(X)                                                                              \
  X(Adam, "adam", "exp_avg", "exp_avg_sq")                                                             \
  X(AdamAmsgrad, "adam_amsgrad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")                            \
  X(Sgd, "sgd")                                                                                        \
  X(SgdMomentum, "sgd_momentum", "momentum_buffer")                                                    \
  X(Adagrad, "adagrad", "sum")                                                                         \
  X(Rmsprop, "rmsprop", "square_avg")                                                                  \
  X(RmspropMomentum, "rmsprop_momentum", "square_avg", "momentum_buffer")                              \
  X(RmspropCentered, "rmsprop_centered", "square_avg", "grad_avg")                                     \
  X(RmspropCenteredMomentum, "rmsprop_centered_momentum", "square_avg", "grad_avg", "momentum_buffer") \
  X(Lion, "lion", "exp_avg")

enum class RuleKind : int32_t {
#define DT_ENUMERATOR(Rule, ...) k##Rule,
  DT_OPTIM_RULES(DT_ENUMERATOR)
#undef DT_ENUMERATOR
};

// Any rule's Args, as bytes: every parameter of a step may have its own (groups, different step counts).
struct RuleArgs {
  alignas(8) unsigned char bytes[96];

  template <class Args>
  static RuleArgs of(const Args& args) {
    static_assert(sizeof(Args) <= sizeof(bytes) && std::is_trivially_copyable_v<Args>);
    RuleArgs result = {};
    memcpy(result.bytes, &args, sizeof(args));
    return result;
  }

  template <class Args>
  DT_HOST_DEVICE Args as() const {
    Args args;
    memcpy(&args, bytes, sizeof(args));
    return args;
  }
};

}  // namespace drivetrain::optim
