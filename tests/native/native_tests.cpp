// The torch-free core on its own, mainly for the sanitizers: kernels on exact-sized heap blocks and from several
// threads, the bucket plan, the progress that another thread reads, the choice of instruction set, and (shm_tests.cpp)
// shared memory. Exits non-zero and names what failed.
#include "native_tests.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "ddp/plan.h"
#include "ddp/progress.h"
#include "optim/step.h"

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
using optim::Format;

struct FixedHypers final : optim::Hypers {
  double operator[](const char* name) const override {
    const std::string key = name;
    if (key == "lr") return 0.1;
    if (key == "beta1" || key == "momentum") return 0.9;
    if (key == "beta2") return 0.99;
    if (key == "eps") return 1e-8;
    if (key == "weight_decay") return 0.01;
    if (key == "decoupled_weight_decay") return 1;
    return 0;
  }
};

// Bytes of what a format has beside its values.
int64_t extra_bytes_of(Format format, int64_t numel) {
  switch (format) {
    case Format::kBFloat16Remainder8:
      return numel;
    case Format::kBFloat16Remainder16:
    case Format::kBFloat16Kahan:
    case Format::kFloat16Kahan:
      return 2 * numel;
    case Format::kFloat16Master:
      return 4 * numel;
    case Format::kSigned8:
    case Format::kSquared8:
      return (numel + optim::kBlock - 1) / optim::kBlock * 4;
    default:
      return 0;
  }
}

// A block of exactly the size needed, so that the address sanitizer sees any access beyond it.
struct Block {
  std::vector<unsigned char> bytes;
  std::vector<unsigned char> extra;
  Format format;

  Block(Format f, int64_t numel, int seed)
      : bytes(optim::bytes_of(f) * numel), extra(extra_bytes_of(f, numel)), format(f) {
    std::vector<double> values(numel);
    for (int64_t i = 0; i < numel; ++i) values[i] = static_cast<double>((i * 37 + seed * 11) % 101 + 1) / 64;
    if (format == Format::kFloat64) {
      std::memcpy(bytes.data(), values.data(), bytes.size());
      return;
    }
    std::vector<float> floats(values.begin(), values.end());
    optim::baseline::convert_cpu({floats.data(), Format::kFloat32}, stream(), numel, /*key=*/7);
  }
  optim::Stream stream() { return {bytes.data(), format, extra.empty() ? nullptr : extra.data()}; }
};

// The formats of one step's streams.
struct Layout {
  const char* name;
  Format param, grad, state;
};
const std::vector<Layout> kLayouts = {
    {"float32", Format::kFloat32, Format::kFloat32, Format::kFloat32},
    {"float64", Format::kFloat64, Format::kFloat64, Format::kFloat64},
    {"bfloat16", Format::kBFloat16, Format::kBFloat16, Format::kBFloat16},
    {"float16", Format::kFloat16, Format::kFloat16, Format::kFloat16},
    {"remainder of 16 bits, signed codes", Format::kBFloat16Remainder16, Format::kBFloat16, Format::kSigned8},
    {"remainder of 8 bits, codes of squares", Format::kBFloat16Remainder8, Format::kBFloat16, Format::kSquared8},
    {"bfloat16 with compensation", Format::kBFloat16Kahan, Format::kFloat32, Format::kBFloat16},
    {"float16 with compensation", Format::kFloat16Kahan, Format::kFloat16, Format::kFloat32},
    {"float16 with master", Format::kFloat16Master, Format::kFloat16, Format::kSquared8},
    {"bfloat16 at random", Format::kBFloat16Stochastic, Format::kBFloat16, Format::kSigned8},
    {"float16 at random", Format::kFloat16Stochastic, Format::kFloat16, Format::kFloat16},
};

using StepCpu = void (*)(const optim::StepJob&, int64_t, int64_t);

StepCpu step_of(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return optim::baseline::step_cpu;
    case Isa::kAvx2:
      return optim::avx2::step_cpu;
    case Isa::kAvx512:
      return optim::avx512::step_cpu;
  }
  return nullptr;
}

int64_t num_blocks(int64_t numel) { return (numel + optim::kBlock - 1) / optim::kBlock; }

const std::vector<int64_t> kSizes = {1, 15, 16, 17, 511, 512, 513, 3000};

// One step over parameters of all sizes with `threads` threads; returns all bytes that it left.
std::vector<unsigned char> run_step(optim::RuleKind kind, const optim::RuleArgs& args, int num_states,
                                    const Layout& layout, Isa isa, int threads) {
  std::vector<std::vector<Block>> blocks;
  std::vector<optim::ParamJob> params;
  int64_t total = 0;
  for (int64_t numel : kSizes) {
    std::vector<Block>& mine = blocks.emplace_back();
    for (int b = 0; b < 2 + num_states; ++b) {
      mine.emplace_back(b == 0 ? layout.param : b == 1 ? layout.grad : layout.state, numel, b);
    }
    optim::ParamJob job = {};
    job.param = mine[0].stream();
    job.grad = mine[1].stream();
    for (int s = 0; s < num_states; ++s) job.state[s] = mine[2 + s].stream();
    job.begin = total = num_blocks(total) * optim::kBlock;
    job.numel = numel;
    job.key = numel * 0x9e3779b97f4a7c15u;
    total += numel;
    params.push_back(job);
  }
  optim::StepJob job = {};
  job.kind = kind;
  job.in_double = layout.param == Format::kFloat64;
  job.params = params.data();
  job.num_params = static_cast<int32_t>(params.size());
  job.rules = &args;
  job.total = total;
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    const auto cut = [&](int64_t part) { return std::min(num_blocks(total) * part / threads * optim::kBlock, total); };
    workers.emplace_back([&, t, cut] { step_of(isa)(job, cut(t), cut(t + 1)); });
  }
  for (std::thread& worker : workers) worker.join();
  std::vector<unsigned char> result;
  for (auto& mine : blocks) {
    for (Block& block : mine) {
      result.insert(result.end(), block.bytes.begin(), block.bytes.end());
      result.insert(result.end(), block.extra.begin(), block.extra.end());
    }
  }
  return result;
}

void test_kernels() {
  struct Rule {
    const char* name;
    optim::RuleKind kind;
    optim::RuleArgs args;
    int num_states;
  };
  const FixedHypers hypers;
  const Rule rules[] = {
#define DT_ROW(Rule, name, ...)                                                                    \
  {name, optim::RuleKind::k##Rule, optim::RuleArgs::of(optim::Rule<float>::Args::make(hypers, 3)), \
   optim::Rule<float>::kNumStates},
      DT_OPTIM_RULES(DT_ROW)
#undef DT_ROW
  };
  for (const Rule& rule : rules) {
    for (const Layout& layout : kLayouts) {
      const auto expected = run_step(rule.kind, rule.args, rule.num_states, layout, Isa::kBaseline, 1);
      for (Isa isa : available_isas()) {
        for (int threads : {1, 3}) {
          const auto found = run_step(rule.kind, rule.args, rule.num_states, layout, isa, threads);
          expect(found == expected, text(rule.name, ", ", layout.name, ", ", name_of(isa), ", ", threads,
                                         " threads: other bytes than baseline with one thread"));
        }
      }
    }
  }
}

void test_plan() {
  const auto buckets =
      ddp::plan_buckets({{100, 4, 0}, {0, 4, 0}, {7, 8, 1}, {1000, 4, 0}}, {3, 2, 1, 0}, {64, 1 << 20});
  int64_t params = 0;
  for (const ddp::BucketPlan& bucket : buckets) {
    params += static_cast<int64_t>(bucket.slots.size());
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
  std::thread watcher([&] {
    while (!ended) {
      const ddp::Progress::Snapshot now = progress.snapshot();
      expect(now.awaited.empty() || (now.awaited == *what && now.needed == ddp::Progress::kBackward + 1 &&
                                     now.place >= now.needed && now.step == now.num_waits + 1),
             "what is seen of a wait belongs together");
      progress.set_report(now.step, "report");
    }
  });
  constexpr int64_t kSteps = 2000;
  for (int64_t step = 1; step <= kSteps; ++step) {
    progress.move_to(step, ddp::Progress::kForward);
    progress.move_to(step, ddp::Progress::kBackward);
    {
      const ddp::Progress::Wait wait(progress, what, ddp::Progress::kBackward + 1);
    }
    progress.end_step();
    progress.move_to(step + 1, ddp::Progress::kIdle);
  }
  ended = true;
  watcher.join();
  progress.set_report(kSteps, "late");
  expect(progress.report(kSteps) == "late" && progress.report(kSteps + 1).empty(), "a report is for its step alone");
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

}  // namespace

int main() {
  test_kernels();
  test_plan();
  test_progress();
  test_isa();
  test_shared_memory();
  std::printf("%s\n", failures == 0 ? "native tests passed" : "native tests FAILED");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
