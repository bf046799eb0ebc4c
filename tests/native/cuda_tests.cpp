// The CUDA kernels on the CPU (cuda_on_cpu/): the same bytes as the CPU's loops, whatever the order of threads.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "grad/norm.h"
#include "native_tests.h"
#include "optim/step.h"
#include "step_blocks.h"

namespace drivetrain {
namespace {

constexpr cuda_on_cpu::Order kOrders[] = {cuda_on_cpu::Order::kForwards, cuda_on_cpu::Order::kBackwards};
const std::vector<int64_t> kSizes = {0, 1, 255, 256, 257, 0, 1283};

void test_step(const TestedRule& rule, const Layout& layout, const optim::GradTreatment& treatment) {
  const Params expected(rule, layout, kSizes);
  optim::StepJob job = expected.job();
  job.treatment = treatment;
  optim::baseline::step_cpu(job, 0, job.total);
  for (cuda_on_cpu::Order order : kOrders) {
    // What depends on the order is the loop's, not the rule's: one rule in both is enough.
    if (order == cuda_on_cpu::Order::kForwards && rule.kind != optim::RuleKind::kAdam) continue;
    cuda_on_cpu::order = order;
    const Params found(rule, layout, kSizes);
    job = found.job();
    job.treatment = treatment;
    optim::step_cuda(job, nullptr);
    expect(found.bytes() == expected.bytes(),
           text("CUDA ", rule.name, ", ", layout.name, ", factor ", treatment.factor, ": other bytes than the CPU"));
  }
}

void test_steps() {
  const optim::GradTreatment treated = {0.3, optim::GradAfter::kTreated}, zeroed = {0.7, optim::GradAfter::kZero};
  for (const TestedRule& rule : tested_rules()) {
    for (const Layout& layout : kLayouts) {
      test_step(rule, layout, {});
      if (rule.kind != optim::RuleKind::kAdam) continue;
      test_step(rule, layout, treated);
      test_step(rule, layout, zeroed);
    }
  }
}

void test_norm() {
  for (const Layout& layout : kLayouts) {
    const TestedRule rule = tested_rules()[0];
    const Params params(rule, layout, {1, 31, 33, grad::kChunk - 1, 0, grad::kChunk + 513, 2 * grad::kChunk});
    std::vector<double> expected;
    for (const optim::ParamJob& job : params.jobs()) {
      for (int64_t begin = 0; begin < job.numel; begin += grad::kChunk) {
        expected.push_back(
            grad::baseline::sum_of_squares_cpu(job.grad, begin, std::min(begin + grad::kChunk, job.numel)));
      }
    }
    std::vector<double> found(params.num_chunks());
    grad::chunk_sums_cuda(params.jobs().data(), static_cast<int32_t>(params.jobs().size()), params.num_chunks(),
                          found.data(), nullptr);
    expect(found == expected, text("CUDA norm, ", layout.name, ": other sums than the CPU"));
  }
}

}  // namespace

void test_cuda_kernels() {
  test_steps();
  test_norm();
}

}  // namespace drivetrain
