// Sums norms for trust ratios: compiled once per instruction set (DRIVETRAIN_ISA names the namespace), includes no
// torch header.
#include "formats/square_sum_cpu.h"
#include "formats/tile_cpu.h"
#include "optim/step.h"

namespace drivetrain::optim::DRIVETRAIN_ISA {
namespace {

template <class Rule, class T>
void directions_of(const Rule& shared_rule, T factor, const T* __restrict param, const T* __restrict grad,
                   const T* __restrict state0, const T* __restrict state1, T* __restrict direction, int64_t count) {
  const Rule rule = shared_rule;  // A local copy cannot alias the arrays.
  static_assert(Rule::kNumStates <= 2);
  for (int64_t i = 0; i < count; ++i) {
    T s[kMaxStates] = {};
    if constexpr (Rule::kNumStates > 0) s[0] = state0[i];
    if constexpr (Rule::kNumStates > 1) s[1] = state1[i];
    direction[i] = rule.direction(param[i], factor * grad[i], s);
  }
}

template <template <class> class RuleOf, class T>
TrustRatioSums sums_of(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end) {
  using Rule = RuleOf<T>;
  const Rule rule = rule_from<Rule>(job.rules[param.rule].template as<typename Rule::Args>());
  alignas(64) T scratch[3 + kMaxStates][kTile];
  formats::SquareSum params, directions;
  for (int64_t i = begin; i < end; i += kTile) {
    const int64_t count = end - i < kTile ? end - i : kTile;
    const T* values = load_tile(param.param, i, count, scratch[0]);
    const T* grad = load_tile(param.grad, i, count, scratch[1]);
    const T* state[kMaxStates] = {};
    for (int s = 0; s < Rule::kNumStates; ++s) {
      state[s] = load_state(param.state[s], param.rows, param.columns, i, count, scratch[3 + s]);
    }
    directions_of(rule, T(job.grad_scaling.factor), values, grad, state[0], state[1], scratch[2], count);
    params.add(values, count);
    directions.add(scratch[2], count);
  }
  return {params.total(), directions.total()};
}

}  // namespace

TrustRatioSums trust_ratio_sums_cpu(const StepJob& job, const ParamJob& param, int64_t begin, int64_t end) {
  switch (job.kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return job.in_double ? sums_of<Rule, double>(job, param, begin, end) : sums_of<Rule, float>(job, param, begin, end);
    DT_TRUST_RATIO_RULES(DT_CASE)
#undef DT_CASE
    default:
      return {};
  }
}

}  // namespace drivetrain::optim::DRIVETRAIN_ISA
