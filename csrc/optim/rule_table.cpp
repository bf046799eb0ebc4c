// Builds the table of native rules; see rule_table.h.
#include "optim/rule_table.h"

#include <initializer_list>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/torch_text.h"

namespace drivetrain::optim {
namespace {

template <class Args>
RuleInfo rule_info(const char* name, RuleKind kind, RuleInfo::Needs needs,
                   const std::vector<std::pair<const char*, StateKind>>& states) {
  RuleInfo info{name,
                kind,
                Args::kCountsSteps,
                [](const Hypers& hypers, double step, const Scalars& scalars) {
                  return RuleArgs::of(make_args<Args>(hypers, step, scalars));
                },
                nullptr,
                nullptr,
                needs,
                {},
                {}};
  if constexpr (kHasScalars<Args>) {
    static_assert(Args::kNumScalars <= kMaxScalars && std::size(Args::kScalarNames) == Args::kNumScalars);
    info.advance = [](const Hypers& hypers, double step, Scalars& scalars) { Args::advance(hypers, step, scalars); };
    for (const char* scalar : Args::kScalarNames) info.scalars.push_back(PyUnicode_InternFromString(scalar));
  }
  if constexpr (requires(Args args) { args.adapt(TrustRatioSums(), int64_t()); }) {
    info.adapt = [](RuleArgs& bytes, const TrustRatioSums& sums, int64_t numel) {
      Args args = bytes.as<Args>();
      args.adapt(sums, numel);
      bytes = RuleArgs::of(args);
    };
  }
  for (const auto& [state, kind_of_state] : states) {
    const std::string name_of_state = state;
    const auto interned = [&](const char* suffix) {
      return PyUnicode_InternFromString((name_of_state + suffix).c_str());
    };
    info.states.push_back({interned(""), interned("_codes"), interned("_scales"), kind_of_state,
                           kind_of_state == StateKind::kMean || kind_of_state == StateKind::kSquared});
  }
  return info;
}

template <template <class> class Rule>
RuleInfo rule_info(const char* name, RuleKind kind, std::initializer_list<const char*> names) {
  constexpr bool kNeedsMatrices = requires { Rule<float>::kNeedsMatrices; };
  constexpr bool kFactorsMatrices = requires { Rule<float>::kFactorsMatrices; };
  // Matrices have two states instead of one.
  constexpr StateKind kFactored[] = {StateKind::kSquaredOfVector, StateKind::kRowMeans, StateKind::kColumnMeans};
  DT_INVARIANT(names.size() == (kFactorsMatrices ? std::size(kFactored) : Rule<float>::kNumStates));
  std::vector<std::pair<const char*, StateKind>> states;
  for (const char* state : names) {
    const size_t s = states.size();
    const StateKind plain = Rule<float>::kSquared[s] ? StateKind::kSquared : StateKind::kMean;
    states.emplace_back(state, kFactorsMatrices ? kFactored[s] : plain);
  }
  return rule_info<typename Rule<float>::Args>(name, kind,
                                               kNeedsMatrices     ? RuleInfo::Needs::kMatrix
                                               : kFactorsMatrices ? RuleInfo::Needs::kRealRowByRow
                                                                  : RuleInfo::Needs::kNothing,
                                               states);
}

}  // namespace

const std::vector<RuleInfo>& all_rules() {
  static const std::vector<RuleInfo> rules = {
#define DT_ROW(Rule, name, ...) rule_info<Rule>(name, RuleKind::k##Rule, {__VA_ARGS__}),
      DT_OPTIM_RULES(DT_ROW) DT_TRUST_RATIO_RULES(DT_ROW)
#undef DT_ROW
          rule_info<MuonArgs>(
              "normuon", RuleKind::kMuonMomentum, RuleInfo::Needs::kMatrix,
              {{"momentum_buffer", StateKind::kMean}, {"second_momentum_buffer", StateKind::kRowMeans}}),
  };
  return rules;
}

const RuleInfo& find_rule(const std::string& name) {
  for (const RuleInfo& rule : all_rules()) {
    if (name == rule.name) return rule;
  }
  throw UserError(text("drivetrain has no optimizer rule named '", name, "'"));
}

}  // namespace drivetrain::optim
