// The CPU step: compiled once per instruction set (DRIVETRAIN_ISA names the namespace), includes no torch header.
#include "optim/loop_cpu.h"

namespace drivetrain::optim::DRIVETRAIN_ISA {

void step_cpu(const StepJob& job, int64_t begin, int64_t end) {
  if (begin >= end) return;
  switch (job.kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return loop_cpu<Rule>(job, begin, end);
    DT_OPTIM_RULES(DT_CASE)
    DT_LAYER_RULES(DT_CASE)
#undef DT_CASE
  }
}

void convert_cpu(const Stream& from, const Stream& to, int64_t numel, uint64_t key) {
  alignas(64) float scratch[kTile];
  for (int64_t i = 0; i < numel; i += kTile) {
    const int64_t count = numel - i < kTile ? numel - i : kTile;
    const float* values = load_tile(from, i, count, scratch);
    if (is_native<float>(to)) {
      memcpy(static_cast<float*>(to.data) + i, values, count * sizeof(float));
    } else {
      store_tile(to, i, count, values, key);
    }
  }
}

}  // namespace drivetrain::optim::DRIVETRAIN_ISA
