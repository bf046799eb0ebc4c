// Plans a CUDA step; see step_plan.h.
#include "optim/step_plan.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace drivetrain::optim {
namespace {

struct KernelKey {
  RuleKind kind;
  Format param, grad;
  int num_states;
  Format state[kMaxStatesOfKernels];
};

template <template <class> class RuleOf>
constexpr Format state_format(Format format, int s) {
  if (s >= RuleOf<float>::kNumStates) return Format::kFloat32;
  return format == Format::kSigned8 && RuleOf<float>::kSquared[s] ? Format::kSquared8 : format;
}

constexpr KernelKey kKernels[] = {
#define DT_ROW(Rule, param, grad, state) \
  {RuleKind::k##Rule,                    \
   Format::param,                        \
   Format::grad,                         \
   Rule<float>::kNumStates,              \
   {state_format<Rule>(Format::state, 0), state_format<Rule>(Format::state, 1)}},
    DT_STEP_KERNELS(DT_ROW)
#undef DT_ROW
};
constexpr int kNumKernels = static_cast<int>(std::size(kKernels));

bool fits(const KernelKey& kernel, RuleKind kind, const ParamJob& param) {
  bool result = param.numel <= kMostStepElements && kernel.kind == kind && kernel.param == param.param.format &&
                kernel.grad == param.grad.format;
  for (int s = 0; s < kernel.num_states; ++s) result &= kernel.state[s] == param.state[s].format;
  return result;
}

StepPlan::Planned planned_of(const ParamJob& param) {
  return {param.numel, param.param.format, param.grad.format, {param.state[0].format, param.state[1].format}};
}

}  // namespace

bool is_plan_of(const StepPlan& plan, const ParamJob* params, size_t num_params) {
  return std::equal(plan.planned.begin(), plan.planned.end(), params, params + num_params,
                    [](const StepPlan::Planned& a, const ParamJob& b) { return a == planned_of(b); });
}

StepPlan plan_step(RuleKind kind, bool in_double, const ParamJob* params, int32_t num_params) {
  constexpr size_t kMaxBlocks = INT32_MAX;
  std::array<std::vector<StepBlock>, kNumKernels> blocks;
  StepPlan plan;
  if (in_double) return {};
  int32_t previous = 0;
  bool continues = false;  // the last block takes consecutive small parameters
  for (int32_t i = 0; i < num_params; ++i) {
    plan.planned.push_back(planned_of(params[i]));
    int32_t kernel = previous;
    if (!fits(kKernels[kernel], kind, params[i])) {
      const KernelKey* const found =
          std::find_if(kKernels, kKernels + kNumKernels, [&](const KernelKey& k) { return fits(k, kind, params[i]); });
      if (found == kKernels + kNumKernels) {
        plan.others.push_back(i);
        continues = false;
        continue;
      }
      kernel = static_cast<int32_t>(found - kKernels);
    }
    const bool has_codes = kKernels[kernel].num_states > 0 && has_blocks(kKernels[kernel].state[0]);
    const bool is_small = params[i].numel <= small_param(has_codes, bytes_of(kKernels[kernel].grad));
    const int most = kStepThreads / (has_codes ? 32 : kLanesOfSmall);
    std::vector<StepBlock>& mine = blocks[kernel];
    if (is_small && continues && kernel == previous && mine.back().part > -most) {
      --mine.back().part;
      continue;
    }
    const int64_t parts = (params[i].numel + kBlockElements - 1) / kBlockElements;
    for (int64_t part = 0; part < parts; ++part) mine.push_back({i, is_small ? -1 : static_cast<int32_t>(part)});
    if (mine.size() > kMaxBlocks) return {};  // exceeds the limit of a launch
    continues = is_small;
    previous = kernel;
  }
  for (int32_t kernel = 0; kernel < kNumKernels; ++kernel) {
    const std::vector<StepBlock>& mine = blocks[kernel];
    if (mine.empty()) continue;
    plan.launches.push_back({kernel, static_cast<int64_t>(plan.blocks.size()), static_cast<int64_t>(mine.size())});
    plan.blocks.insert(plan.blocks.end(), mine.begin(), mine.end());
  }
  if (plan.launches.empty()) plan.others.clear();
  return plan;
}

}  // namespace drivetrain::optim
