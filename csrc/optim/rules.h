// The optimizers' arithmetic: one small struct per rule, on values that are already loaded. Host and device; no torch.
//
// A rule is a plain-data Args (made once per step, in double, by code that CPU and GPU share)
// and a template <class T> whose operator() updates one element; kSquared says which of its states are means or sums of
// squares, of which 8 bits keep the root. A new element-wise optimizer is one such pair and one row in DT_OPTIM_RULES,
// which names its states as torch's class does. A rule whose step has a length that depends on the whole parameter's
// norms (DT_LAYER_RULES) says its direction apart, and what to make of the norms: see layer.h. Args that depend on the
// shape of a matrix have fit(rows, columns), called once with it, both 0 where the parameter is none.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "optim/storage.h"

namespace drivetrain::optim {

constexpr int kMaxStates = 3;

// Over a whole parameter: sums of the squares of its elements, and of its direction's.
struct LayerSums {
  double param = 0, direction = 0;
};

// A step's hyper-parameters by torch's names, as the Python class gives them; of those that it does not, no number.
#define DT_HYPERS(X)        \
  X(lr)                     \
  X(weight_decay)           \
  X(decoupled_weight_decay) \
  X(maximize)               \
  X(eps)                    \
  X(beta1)                  \
  X(beta2)                  \
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
  X(ns_steps)

struct Hypers {
#define DT_FIELD(name) double name = NAN;
  DT_HYPERS(DT_FIELD)
#undef DT_FIELD
};

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {
#endif

DT_HOST_DEVICE float square_root(float x) { return sqrtf(x); }
DT_HOST_DEVICE double square_root(double x) { return sqrt(x); }

// base to the power of a whole number, by squaring: the same bits on CPU and GPU, which those of pow are not. Its
// relative error is at most exponent * 2^-53, which is far below what 1 - power is rounded to wherever power is not
// negligible.
DT_HOST_DEVICE double power(double base, double exponent) {
  double result = 1;
  for (uint64_t rest = exponent >= 1 && exponent < 1e18 ? static_cast<uint64_t>(exponent) : 0; rest > 0; rest >>= 1) {
    if ((rest & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

// A base of 1 or above to any power of 0 or below, as exp(exponent * log(base)): the same bits on CPU and GPU, and a
// relative error of some 2^-53 times that logarithm's size. (Bases below 1 count as 1, powers below 1e-307 as 0.)
DT_HOST_DEVICE double decayed(double base, double exponent) {
  if (!(base > 1)) return 1;
  constexpr double kLog2 = 0.693147180559945309417;
  // base = mantissa * 2^shift, with a mantissa near 1, whose logarithm is 2 artanh((mantissa - 1) / (mantissa + 1)).
  const uint64_t bits = bits_as<uint64_t>(base);
  double shift = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  double mantissa = bits_as<double>((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
  if (mantissa > 1.4142135623730951) {
    mantissa *= 0.5;
    shift += 1;
  }
  const double ratio = (mantissa - 1) / (mantissa + 1), square = ratio * ratio;
  double series = 0;
  for (int k = 21; k > 0; k -= 2) series = series * square + 1.0 / k;
  const double logarithm = exponent * (2 * ratio * series + shift * kLog2);
  if (!(logarithm > -707)) return 0;
  // exp of it, 2^whole times that of what is left, which is half of log(2) at most.
  constexpr double kLog2Leading = 0x1.62e42feep-1, kLog2Rest = 0x1.a39ef35793c76p-33;
  constexpr double kRounds = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves no room for a fraction
  const double whole = (logarithm * (1 / kLog2) + kRounds) - kRounds;
  const double rest = (logarithm - whole * kLog2Leading) - whole * kLog2Rest;
  double exponential = 1;
  for (int k = 14; k > 0; --k) exponential = 1 + exponential * rest / k;
  return exponential * bits_as<double>(static_cast<uint64_t>(static_cast<int64_t>(whole) + 1023) << 52);
}

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

// The same of min, for the first of both.
template <class T>
DT_HOST_DEVICE T minimum(T a, T b) {
  return a >= b ? b : a;
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
  static DT_HOST_DEVICE AdamArgs make(const Hypers& hyper, double step) {
    const double lr = hyper.lr, weight_decay = hyper.weight_decay;
    const bool decoupled = hyper.decoupled_weight_decay != 0;
    AdamArgs args;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.decay = decoupled ? 1 - lr * weight_decay : 1;
    args.l2 = decoupled ? 0 : weight_decay;
    const double bias_correction2_sqrt = sqrt(1 - power(args.beta2, step));
    args.step_size = lr / (1 - power(args.beta1, step)) * bias_correction2_sqrt;
    args.eps = hyper.eps * bias_correction2_sqrt;
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
  static DT_HOST_DEVICE SgdArgs make(const Hypers& hyper, double step) {
    SgdArgs args;
    args.lr = hyper.lr;
    args.l2 = hyper.weight_decay;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.momentum = hyper.momentum;
    args.gradient_share = step > 1 ? 1 - hyper.dampening : 1;
    args.nesterov = hyper.nesterov;
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
  static DT_HOST_DEVICE RmspropArgs make(const Hypers& hyper, double) {
    RmspropArgs args;
    args.lr = hyper.lr;
    args.alpha = hyper.alpha;
    args.eps = hyper.eps;
    args.l2 = hyper.weight_decay;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.momentum = hyper.momentum;
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
  static DT_HOST_DEVICE LionArgs make(const Hypers& hyper, double) {
    LionArgs args;
    args.lr = hyper.lr;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.decay = 1 - args.lr * hyper.weight_decay;
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

// ---- LAMB (You et al. 2020, alg. 2): Adam's direction, and steps as long as the parameter's own norm says.
struct LambArgs {
  double beta1, beta2, sign, weight_decay;
  double gradient_share;  // 1 - beta1, or 1 if gradients are added up and not averaged
  double direction_size;  // sqrt(bias_correction2) / bias_correction1
  double eps;             // eps * sqrt(bias_correction2): one division per element, as in Adam
  double step_size;       // lr, times the trust ratio once adapt() has been told the norms
  double adapts;          // whether there is one
  double clips;           // whether it is at most 1

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE LambArgs make(const Hypers& hyper, double step) {
    LambArgs args;
    args.beta1 = hyper.beta1;
    args.beta2 = hyper.beta2;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.weight_decay = hyper.weight_decay;
    args.gradient_share = hyper.grad_averaging != 0 ? 1 - args.beta1 : 1;
    const bool corrects = hyper.bias_correction != 0;
    const double correction1 = corrects ? 1 - power(args.beta1, step) : 1;
    const double correction2_sqrt = corrects ? sqrt(1 - power(args.beta2, step)) : 1;
    args.direction_size = correction2_sqrt / correction1;
    args.eps = hyper.eps * correction2_sqrt;
    args.step_size = hyper.lr;
    args.adapts = args.weight_decay != 0 || hyper.always_adapt != 0;
    args.clips = hyper.trust_clip;
    return args;
  }

  DT_HOST_DEVICE void adapt(const LayerSums& sums, int64_t) {
    if (adapts == 0 || !(sums.param > 0) || !(sums.direction > 0)) return;
    const double ratio = sqrt(sums.param / sums.direction);
    step_size *= clips != 0 && ratio > 1 ? 1 : ratio;
  }
};

template <class T>
struct Lamb {
  using Args = LambArgs;
  static constexpr int kNumStates = 2;
  static constexpr bool kSquared[kMaxStates] = {false, true};
  T beta1, beta2, one_minus_beta2, sign, weight_decay, gradient_share, direction_size, eps, step_size;

  DT_HOST_DEVICE explicit Lamb(const Args& a)
      : beta1(T(a.beta1)),
        beta2(T(a.beta2)),
        one_minus_beta2(T(1 - a.beta2)),
        sign(T(a.sign)),
        weight_decay(T(a.weight_decay)),
        gradient_share(T(a.gradient_share)),
        direction_size(T(a.direction_size)),
        eps(T(a.eps)),
        step_size(T(a.step_size)) {}

  DT_HOST_DEVICE T direction(T param, T grad, T (&state)[kMaxStates]) const {
    T& exp_avg = state[0];
    T& exp_avg_sq = state[1];
    grad = sign * grad;
    exp_avg = beta1 * exp_avg + gradient_share * grad;
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad);
    return direction_size * (exp_avg / (square_root(exp_avg_sq) + eps)) + weight_decay * param;
  }

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    param = param - step_size * direction(param, grad, state);
  }
};

// ---- Muon (Jordan et al. 2024, in torch's form): a momentum, what an iteration over matrices makes of it (muon.cpp),
// and a step along the result. Two rules with one Args: the first writes the momentum where the second's gradient is.
struct MuonArgs {
  double momentum, nesterov;
  double decay;      // 1 - lr * weight_decay
  double step_size;  // lr, times what adjusted() makes of the matrix's shape
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

// ---- Adafactor (Shazeer & Stern 2018, alg. 4 and 5, in torch's form). Vectors keep a second moment per element; a
// matrix has it factored (adafactor_pass.h), by passes of their own before this rule's, whose state is then
// 1 / sqrt(second moment).
struct AdafactorArgs {
  double sign;
  double fresh;  // what the newest gradient counts in second moments: step ** beta2_decay
  double eps1, eps2, d;
  double decay;      // 1 - lr * weight_decay
  double step_size;  // min(lr, 1 / sqrt(step)), times what adapt() makes of both norms
  double is_matrix;

  static constexpr bool kCountsSteps = true;
  static DT_HOST_DEVICE AdafactorArgs make(const Hypers& hyper, double step) {
    AdafactorArgs args;
    args.sign = hyper.maximize != 0 ? -1 : 1;
    args.fresh = decayed(step, hyper.beta2_decay);
    args.eps1 = hyper.eps1;
    args.eps2 = hyper.eps2;
    args.d = hyper.d;
    args.decay = 1 - hyper.lr * hyper.weight_decay;
    args.step_size = fmin(hyper.lr, 1 / sqrt(step));
    args.is_matrix = 0;
    return args;
  }

  DT_HOST_DEVICE void fit(int64_t rows, int64_t) { is_matrix = rows > 0; }

  DT_HOST_DEVICE void adapt(const LayerSums& sums, int64_t numel) {
    const double param_size = sqrt(sums.param / numel), size = sqrt(sums.direction / numel);
    step_size *= maximum(param_size, eps2) / maximum(size / d, 1.0);
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
    variance = variance + fresh * (grad * grad - variance);
    return sign * grad / square_root(maximum(variance, floor));
  }

  DT_HOST_DEVICE void operator()(T& param, T grad, T (&state)[kMaxStates]) const {
    param = param * decay - step_size * direction(param, grad, state);
  }
};

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

// ---- The tables of rules: X(template, name in Python, names of its states in Python).
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
  X(Lion, "lion", "exp_avg")                                                                           \
  X(MuonMomentum, "muon", "momentum_buffer")                                                           \
  X(MuonStep, "muon_step")

#define DT_LAYER_RULES(X)                  \
  X(Lamb, "lamb", "exp_avg", "exp_avg_sq") \
  X(Adafactor, "adafactor", "variance", "row_var", "col_var")

enum class RuleKind : int32_t {
#define DT_ENUMERATOR(Rule, ...) k##Rule,
  DT_OPTIM_RULES(DT_ENUMERATOR) DT_LAYER_RULES(DT_ENUMERATOR)
#undef DT_ENUMERATOR
};

// Any rule's Args, as bytes: every parameter of a step may have its own (groups, different step counts).
struct RuleArgs {
  alignas(8) unsigned char bytes[96];

  template <class Args>
  static DT_HOST_DEVICE RuleArgs of(const Args& args) {
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
