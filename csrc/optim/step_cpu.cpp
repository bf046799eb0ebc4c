// Runs the CPU step: compiled once per instruction set (DRIVETRAIN_ISA names the namespace), includes no torch header.
#include "optim/loop_cpu.h"

namespace drivetrain::optim::DRIVETRAIN_ISA {

void step_cpu(const StepJob& job, int64_t begin, int64_t end) {
  if (begin >= end) return;
  switch (job.kind) {
#define DT_CASE(Rule, ...) \
  case RuleKind::k##Rule:  \
    return job.statistics == nullptr ? loop_cpu<Rule, false>(job, begin, end) : loop_cpu<Rule, true>(job, begin, end);
    DT_OPTIM_RULES(DT_CASE)
    DT_TRUST_RATIO_RULES(DT_CASE)
#undef DT_CASE
  }
}

}  // namespace drivetrain::optim::DRIVETRAIN_ISA
