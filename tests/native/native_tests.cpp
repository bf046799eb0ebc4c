// Runs the tests of the torch-free core, mainly for the sanitizers. This file tests kernels on exact-sized heap blocks
// and from several threads. It also tests the bucket plan, the progress that another thread reads, and the choice of
// instruction set. The other files test shared memory, CUDA kernels and the activation budget's solver. A failure is
// printed and makes the exit status non-zero.
#include "native_tests.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "ddp/bucket_plan.h"
#include "ddp/progress.h"
#include "optim/step.h"
#include "step_blocks.h"

namespace drivetrain {

static std::atomic<int> failures{0};

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  ++failures;
}

}  // namespace drivetrain

namespace {

using namespace drivetrain;
using StepCpu = void (*)(const optim::StepJob&, int64_t, int64_t);

StepCpu step_of([[maybe_unused]] Isa isa) {
#ifdef DRIVETRAIN_ONE_STEP  // see CMakeLists.txt
  return optim::baseline::step_cpu;
#else
  return for_isa(isa, DT_BY_ISA(optim, step_cpu));
#endif
}

const std::vector<int64_t> kSizes = {1, 15, 16, 17, 511, 512, 513, 3000};

// Runs one step over parameters of all sizes with `threads` threads. Returns all bytes that the tensors hold then.
std::vector<unsigned char> run_step(const TestedRule& rule, const Layout& layout, Isa isa, int threads) {
  const Params params(rule, layout, kSizes);
  const optim::StepJob job = params.job();
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    const auto cut = [&](int64_t part) {
      return std::min(num_blocks(job.total) * part / threads * formats::kBlock, job.total);
    };
    workers.emplace_back([&, t, cut] { step_of(isa)(job, cut(t), cut(t + 1)); });
  }
  for (std::thread& worker : workers) worker.join();
  return params.bytes();
}

void test_kernels() {
  for (const TestedRule& rule : tested_rules()) {
    for (const Layout& layout : kLayouts) {
      const auto expected = run_step(rule, layout, Isa::kBaseline, 1);
#ifdef DRIVETRAIN_ONE_STEP
      const std::vector<Isa> isas = {Isa::kBaseline};
#else
      const std::vector<Isa> isas = available_isas();
#endif
      for (Isa isa : isas) {
        for (int threads : {1, 3}) {
          const auto found = run_step(rule, layout, isa, threads);
          expect(found == expected, text(rule.name, ", ", layout.name, ", ", name_of(isa), ", ", threads,
                                         " threads: other bytes than baseline with one thread"));
        }
      }
    }
  }
}

// real_power() must agree with the standard library's pow up to the last bits.
void test_real_power() {
  for (double base :
       {1e-300, 0.25, 0.96, 0.9999, 1.0, 1.0001, 2.0, 3.0, 7.0, 1000.0, 1448.0, 123456.0, 1e9, 9007199254740992.0}) {
    for (double exponent : {0.0, -0.8, -0.5, -1.0, -1e-3, -13.7, -50.0, 4e-3, 0.75, 13.7, 50.0}) {
      const double expected = std::pow(base, exponent), found = optim::real_power(base, exponent);
      const double tolerance = 1e-15 * (1 + std::abs(std::log(expected))) * expected;
      expect(std::abs(found - expected) <= tolerance || expected < 1e-306 || (expected > 1e306 && found > 1e306),
             text(base, " to the power of ", exponent, " is ", found, ", not ", expected));
    }
  }
  expect(optim::real_power(5, 0) == 1 && optim::real_power(1, -0.8) == 1, "a result of 1 is exact");
  expect(optim::real_power(0, 0.5) == 0 && std::isinf(optim::real_power(0, -0.5)), "0 has powers of 0 and infinity");
  expect(std::isnan(optim::real_power(-1, 0.5)), "a negative base has no real power");
}

void test_plan() {
  const auto buckets =
      ddp::plan_buckets({{100, 4, 0}, {0, 4, 0}, {7, 8, 1}, {1000, 4, 0}}, {3, 2, 1, 0}, {64, 1 << 20});
  int64_t params = 0;
  for (const ddp::BucketPlan& bucket : buckets) {
    params += static_cast<int64_t>(bucket.entries.size());
    expect(bucket.bytes % ddp::kAlignment == 0, "bucket sizes are aligned");
  }
  expect(params == 4, "every parameter is planned once");
  bool threw = false;
  try {
    ddp::plan_buckets({{1, 4, 0}}, {}, {1});
  } catch (const InvariantError&) {
    threw = true;
  }
  expect(threw, "an order that does not fit the sizes is refused");
}

void test_progress() {
  ddp::Progress progress;
  const auto what = std::make_shared<const std::string>("bucket 0 of 1 [weight]");
  std::atomic<bool> ended{false};
  int64_t marked = 0;  // not atomic: no mark is set while another one is queried
  constexpr int64_t kSteps = 2000;
  std::thread watcher([&] {
    while (!ended) {
      const std::optional<ddp::Progress::DeviceLag> lag = progress.device_lag();
      expect(!lag || (lag->step >= 1 && lag->step <= kSteps && lag->seconds >= 0),
             "a lag belongs to a step that was marked");
      const ddp::Progress::Snapshot now = progress.snapshot();
      expect(now.awaited.empty() || (now.awaited == *what && now.needed == ddp::Progress::kBackward + 1 &&
                                     now.position >= now.needed && now.step == now.num_waits + 1),
             "a snapshot of a wait is consistent");
      progress.set_report(now.step, "report");
    }
  });
  for (int64_t step = 1; step <= kSteps; ++step) {
    progress.move_to(step, ddp::Progress::kForward);
    progress.move_to(step, ddp::Progress::kBackward);
    {
      const ddp::Progress::Wait wait(progress, what, ddp::Progress::kBackward + 1);
    }
    progress.end_step();
    const auto set_mark = [&] {
      marked = step;
      std::this_thread::yield();  // lets a watcher that ignores the rule above read the mark
    };
    progress.end_on_device(set_mark, [&] { return marked > kSteps; });
    progress.move_to(step + 1, ddp::Progress::kIdle);
  }
  ended = true;
  watcher.join();
  int questions = 0;
  progress.end_on_device([] {}, [&] { return ++questions == 3; });
  const std::optional<ddp::Progress::DeviceLag> lag = progress.device_lag();
  progress.move_to(kSteps + 2, ddp::Progress::kForward);
  const std::optional<ddp::Progress::DeviceLag> later = progress.device_lag();
  expect(lag && lag->step == kSteps + 1 && later && later->step == lag->step && later->seconds >= lag->seconds,
         "a lag belongs to the step that the mark ended, wherever the host is");
  expect(!progress.device_lag() && !progress.device_lag() && questions == 3,
         "a device is queried until it has reached the mark");
  progress.set_report(kSteps, "late");
  expect(progress.report(kSteps) == "late" && progress.report(kSteps + 1).empty(), "a report belongs to its step only");
  const ddp::Progress::Snapshot after = progress.snapshot();
  expect(after.awaited.empty() && after.num_waits == kSteps && after.wait_s >= 0, "waits end and are counted");
}

void test_isa() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] { expect(chosen_isa() >= Isa::kBaseline, "an instruction set is chosen"); });
  }
  for (std::thread& thread : threads) thread.join();
}

// text() must give the same characters as a std::ostringstream, which error messages used before.
template <class... Parts>
void test_text_of(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  expect(text(parts...) == stream.str(), "text() gives '" + text(parts...) + "', a stream '" + stream.str() + "'");
}

void test_text() {
  test_text_of("bucket ", 3, " of ", size_t{12}, std::string(" ["), std::string_view("a, b"), ']');
  test_text_of(true, ' ', false, ' ', INT64_MIN, ' ', UINT64_MAX, ' ', short{-1}, ' ', uint32_t{7});
  for (double value : {0.0, -0.0, 1.0, 0.1, 1e-5, 123456.0, 1234567.0, 1e21, -2.5e-300, 1.0 / 3, double(INFINITY)}) {
    test_text_of(value, " and ", static_cast<float>(value));
  }
  test_text_of(std::nan(""), ' ', -INFINITY);
}

}  // namespace

int main() {
  test_text();
  test_kernels();
  test_real_power();
  test_plan();
  test_progress();
  test_isa();
  test_shared_memory();
  test_tag_board();
  test_checkpointing();
  test_trace();
#ifndef DRIVETRAIN_ONLY_THREADS  // see CMakeLists.txt
  test_cuda_kernels();
  test_step_kernels();
  test_conversions();
  test_solver();
  test_packing();
  test_wire();
#endif
  std::printf("%s\n", failures == 0 ? "native tests passed" : "native tests FAILED");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
