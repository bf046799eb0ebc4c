// Tests the CUDA kernels on the CPU (cuda_on_cpu/): in any order of threads they write the bytes of the CPU's loops.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/write_cuda.h"
#include "formats/total.h"
#include "grad/add_micro_grad.h"
#include "grad/norm.h"
#include "native_tests.h"
#include "optim/adafactor.h"
#include "optim/cuda_step.h"
#include "step_blocks.h"

namespace drivetrain {
namespace {

// Fibers are slow under the thread sanitizer, and only the loops can race, which all rules share.
#if defined(__SANITIZE_THREAD__)
constexpr bool kOneRule = true;
#else
constexpr bool kOneRule = false;
#endif
const std::vector<int64_t> kSizes = {0, 1, 255, 256, 257, 0, 1283};

void test_step(const TestedRule& rule, const Layout& layout, const optim::GradScaling& grad_scaling) {
  const Params expected(rule, layout, kSizes);
  optim::StepJob job = expected.job();
  job.grad_scaling = grad_scaling;
  optim::baseline::step_cpu(job, 0, job.total);
  for (const int seed : cuda_on_cpu::kSeeds) {
    // The order of threads matters to the loop only, so that one rule tests several.
    if (seed != cuda_on_cpu::kSeeds[0] && rule.kind != optim::RuleKind::kAdam) continue;
    cuda_on_cpu::set_seed(seed);
    const Params found(rule, layout, kSizes);
    job = found.job();
    job.grad_scaling = grad_scaling;
    optim::step_cuda(job, nullptr);
    expect(found.bytes() == expected.bytes(),
           text("CUDA ", rule.name, ", ", layout.name, ", factor ", grad_scaling.factor, ": other bytes than the CPU"));
  }
}

void test_steps() {
  const optim::GradScaling treated = {0.3, optim::GradAfter::kScaled}, zeroed = {0.7, optim::GradAfter::kZero};
  for (const TestedRule& rule : tested_rules()) {
    if (kOneRule && rule.kind != optim::RuleKind::kAdam) continue;
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
    const Params params(rule, layout, {1, 31, 33, formats::kChunk - 1, 0, formats::kChunk + 513, 2 * formats::kChunk});
    std::vector<double> expected;
    for (const optim::ParamJob& job : params.jobs()) {
      for (int64_t begin = 0; begin < job.numel; begin += formats::kChunk) {
        expected.push_back(
            grad::baseline::sum_of_squares_cpu(job.grad, begin, std::min(begin + formats::kChunk, job.numel)));
      }
    }
    std::vector<double> found(params.num_chunks());
    optim::chunk_sums_cuda(params.jobs().data(), static_cast<int32_t>(params.jobs().size()), params.num_chunks(),
                           found.data(), nullptr);
    expect(found == expected, text("CUDA norm, ", layout.name, ": other sums than the CPU"));
  }
}

// Sums gradients that begin anywhere, of sizes around a row and a thread's loads, with values of all magnitudes.
void test_norm_of_views() {
  for (const Format format : {Format::kFloat32, Format::kFloat64, Format::kBFloat16, Format::kFloat16}) {
    for (const bool is_special : {false, true}) {
      std::vector<std::vector<unsigned char>> memory;
      std::vector<optim::ParamJob> jobs;
      int64_t num_chunks = 0;
      for (const int64_t numel : {1, 7, 31, 256, 511, 512, 513, 1024, 1025, 4095, 4096, 4097, 8300}) {
        for (const int64_t offset : {0, 1, 4, 7}) {
          const int64_t bytes = formats::bytes_of(format);
          std::vector<unsigned char>& mine = memory.emplace_back((numel + offset) * bytes);
          for (size_t i = 0; i < mine.size(); ++i)
            mine[i] = static_cast<unsigned char>(formats::mixed(i + 977 * numel));
          // A cleared bit of the exponent makes each value finite.
          for (int64_t i = 0; !is_special && i < numel + offset; ++i) mine[(i + 1) * bytes - 1] &= 0xbf;
          optim::ParamJob job = {};
          job.grad = {mine.data() + offset * bytes, format};
          job.numel = numel;
          job.first_chunk = num_chunks;
          num_chunks += formats::num_chunks(numel);
          jobs.push_back(job);
        }
      }
      std::vector<double> expected, found(num_chunks);
      for (const optim::ParamJob& job : jobs) {
        for (int64_t begin = 0; begin < job.numel; begin += formats::kChunk) {
          expected.push_back(
              grad::baseline::sum_of_squares_cpu(job.grad, begin, std::min(begin + formats::kChunk, job.numel)));
        }
      }
      optim::chunk_sums_cuda(jobs.data(), static_cast<int32_t>(jobs.size()), num_chunks, found.data(), nullptr);
      for (const optim::ParamJob& job : jobs) {
        std::vector<double> alone(formats::num_chunks(job.numel));
        optim::chunk_sums_cuda(job.grad, job.numel, alone.data(), nullptr);
        expect(std::memcmp(alone.data(), &found[job.first_chunk], alone.size() * sizeof(double)) == 0,
               text("CUDA norm of one gradient of ", job.numel, " elements: other sums than of all"));
      }
      for (size_t i = 0; i < found.size(); ++i) {
        const bool both_nan = std::isnan(found[i]) && std::isnan(expected[i]);
        expect(both_nan || found[i] == expected[i], text("CUDA norm of views, chunk ", i, ": another sum"));
        expect(is_special || format == Format::kFloat64 || std::isfinite(found[i]), "finite values have a finite sum");
      }
    }
  }
}

// Holds a main gradient, float32 or bfloat16 with 8 bits of remainder, which begins at any element of its memory.
struct Main {
  std::vector<unsigned char> values, residual;
  int64_t offset;

  Main(int64_t numel, bool with_residual, int64_t first)
      : values((numel + first) * (with_residual ? 2 : 4), 0xa5),
        residual(with_residual ? numel + first : 0, 0x5a),
        offset(first) {}
  formats::TypedArray stream() {
    if (residual.empty()) return {values.data() + 4 * offset, Format::kFloat32};
    return {values.data() + 2 * offset, Format::kBFloat16Remainder8, residual.data() + offset};
  }
  // Treats NaNs as equal: the sum of two NaNs has the bits of either, as the compiler and the processor choose.
  bool is_same(const Main& other) const {
    const size_t bytes = residual.empty() ? 4 : 2;
    for (size_t i = 0; i < values.size() / bytes; ++i) {
      const float mine = value(i), theirs = other.value(i);
      if (mine != mine && theirs != theirs) continue;
      if (std::memcmp(&values[i * bytes], &other.values[i * bytes], bytes) != 0) return false;
      if (!residual.empty() && residual[i] != other.residual[i]) return false;
    }
    return true;
  }

 private:
  float value(size_t i) const {
    if (residual.empty()) return reinterpret_cast<const float*>(values.data())[i];
    return formats::float_from_bfloat16(reinterpret_cast<const uint16_t*>(values.data())[i]);
  }
};

// Accumulates three micro-gradients of `format` into float32, or into bfloat16 with 8 bits of remainder. Both arrays
// may begin at any element.
void test_accumulation(int64_t numel, bool with_residual, Format format, int64_t main_offset, int64_t micro_offset) {
  const auto run = [&](const auto& accumulate) {
    Main main(numel, with_residual, main_offset);
    for (int64_t micro_step = 0; micro_step < 3; ++micro_step) {
      std::vector<unsigned char> micro((numel + micro_offset) * formats::bytes_of(format));
      for (size_t i = 0; i < micro.size(); ++i) {
        micro[i] = static_cast<unsigned char>(formats::mixed(i + 1000 * micro_step));  // of all magnitudes, and NaN
      }
      accumulate(grad::Addition{
          main.stream(), {micro.data() + micro_offset * formats::bytes_of(format), format}, micro_step == 0});
    }
    return main;
  };
  const Main expected =
      run([&](const grad::Addition& addition) { grad::baseline::accumulate_cpu(addition, 0, numel); });
  const Main found = run([&](const grad::Addition& addition) { accumulate_cuda(addition, numel, nullptr); });
  expect(found.is_same(expected), text("CUDA accumulation of ", numel, ": other bytes than the CPU"));
  expect(numel == 0 || found.values != Main(numel, with_residual, main_offset).values, "an accumulation writes");
}

void test_accumulations() {
  for (const bool with_residual : {false, true}) {
    for (const Format format : {Format::kBFloat16, Format::kFloat16, Format::kFloat32, Format::kFloat64}) {
      for (const int64_t numel : {0, 1, 15, 255, 257, 4096, 4097, 9001}) {
        test_accumulation(numel, with_residual, format, 0, 0);
      }
      test_accumulation(5000, with_residual, format, 1, 0);
      test_accumulation(5000, with_residual, format, 0, 3);
      test_accumulation(5000, with_residual, format, 8, 8);
    }
  }
}

void test_grad_scaling() {
  constexpr double kInf = INFINITY;
  for (int64_t count : {0, 1, 33, 1000, 1024, 1025, 70'001}) {
    for (double last : {4.0, kInf, static_cast<double>(NAN)}) {
      for (const optim::GradScalingOptions& asked : {optim::GradScalingOptions{},
                                                     {4, 0, true, kInf, false},
                                                     {4, 0, true, 0.5, true},
                                                     {2, 3, false, kInf, false}}) {
        std::vector<double> sums(count);
        formats::SumOfChunks total;
        for (int64_t i = 0; i < count; ++i) {
          sums[i] = i + 1 == count ? last : 1.0 / static_cast<double>(i + 3);
          total.add(sums[i]);
        }
        const optim::GradScaling expected = optim::grad_scaling_of(asked, total.get());
        const float scale = static_cast<float>(asked.grad_scale), found_inf = static_cast<float>(asked.found_inf);
        optim::GradScalingOptions rest = asked;
        rest.grad_scale = 1;
        rest.found_inf = 0;
        float overflow = -1;
        optim::GradScaling found;
        optim::compute_grad_scaling_cuda(rest, {&scale, &found_inf, &overflow}, sums.data(), count, &found, nullptr);
        const bool is_same_norm = found.norm == expected.norm || (found.norm != found.norm && last != 4.0);
        const bool is_same_factor = found.factor == expected.factor || (expected.skips && found.skips);
        expect(is_same_norm && is_same_factor && found.after == expected.after && found.skips == expected.skips,
               text("CUDA grad scaling of ", count, " chunks, the last ", last, ": another than the CPU's"));
        expect(overflow == ((asked.measures && count > 0 && !(last == 4.0)) ? 1.0f : 0.0f), "an overflow is told of");
      }
    }
  }
}

// Makes a whole step as optim/run_cuda.cpp does: norm, grad scaling, start and step, with float and double counters.
void test_whole_step(size_t which, const Layout& layout, bool overflows, bool is_scaled_on_device) {
  constexpr double kSteps = 2;
  const TestedRule rule = tested_rules(kSteps + 1)[which];
  const optim::GradScalingOptions asked = {4, 0, true, 2.5, true};
  const uint64_t seed = 77;
  Params expected(rule, layout, kSizes), found(rule, layout, kSizes);
  if (overflows) {
    for (Params* params : {&expected, &found}) {
      auto* grad = static_cast<unsigned char*>(params->jobs().back().grad.data);
      std::memset(grad + 2 * formats::bytes_of(layout.grad), 0xff, formats::bytes_of(layout.grad));  // a NaN
    }
  }
  const std::vector<unsigned char> before = found.bytes();
  formats::SumOfChunks total;
  for (optim::ParamJob& job : expected.jobs()) {
    total.add(grad::baseline::sum_of_squares_cpu(job.grad, 0, job.numel));
    job.key = formats::random_key(seed, kSteps);
  }
  optim::StepJob cpu = expected.job();
  cpu.grad_scaling = optim::grad_scaling_of(asked, total.get());
  expect(cpu.grad_scaling.skips == overflows, "a step is left out where a gradient is not finite");
  if (!overflows) optim::baseline::step_cpu(cpu, 0, cpu.total);

  std::vector<optim::ParamJob>& params = found.jobs();
  const auto num_params = static_cast<int32_t>(params.size());
  float counter = kSteps;
  double double_counter = kSteps;
  std::vector<float> counters(params.size(), kSteps);
  const double lr = fixed_hypers().lr;
  std::vector<optim::GroupNumbers> numbers = {{fixed_hypers(), nullptr, false}, {fixed_hypers(), &lr, true}};
  numbers[1].hypers.lr = NAN;
  std::vector<optim::ParamStart> starts;
  // The scalars of the state are float32, but float64 for the parameter without elements, which is last.
  const optim::Scalars before_step = fixed_scalars();
  const int num_scalars = num_scalars_of(rule.kind);
  std::vector<std::array<float, optim::kMaxScalars>> floats(params.size());
  std::array<double, optim::kMaxScalars> doubles = {};
  const auto give_scalars = [&](optim::ParamStart& start, size_t i) {
    for (int s = 0; s < num_scalars; ++s) {
      start.scalars_are_double[s] = i == floats.size();
      if (i == floats.size()) {
        doubles[s] = before_step.value[s];
        start.scalars[s] = &doubles[s];
      } else {
        floats[i][s] = static_cast<float>(before_step.value[s]);
        start.scalars[s] = &floats[i][s];
      }
    }
  };
  for (int32_t i = 0; i < num_params; ++i) {
    params[i].rule = i;
    params[i].key = 0;
    starts.push_back({&counters[i], false, true, i % 2, 0, seed});
    give_scalars(starts.back(), i);
  }
  starts[0].counter = &counter;
  starts[1].counter = &double_counter;
  starts[1].counter_is_double = true;
  starts[2].counter = nullptr;  // The rule counts no steps, so the host passes their number.
  starts[2].counts_steps = false;
  starts[2].steps_done = kSteps;
  const bool draws = layout.param == Format::kBFloat16Stochastic || layout.param == Format::kFloat16Stochastic;
  if (draws) starts[2].counter = &counters[2];

  float empty_counter = kSteps;
  starts.push_back({&empty_counter, false, true, 0, 0, seed});
  give_scalars(starts.back(), params.size());

  // Copies the table with the kernel whose arguments a graph stores.
  std::vector<optim::ParamJob> table(params.size());
  write_cuda(table.data(), params.data(), params.size() * sizeof(optim::ParamJob), nullptr);
  std::vector<double> sums(found.num_chunks());
  std::vector<optim::RuleArgs> rules(params.size());
  optim::GradScaling grad_scaling;
  const optim::StepPlan plan = optim::plan_step(rule.kind, layout.param == Format::kFloat64, params.data(), num_params);
  std::vector<optim::StepRecord> records(plan.launches.empty() ? 0 : params.size());
  optim::chunk_sums_cuda(table.data(), num_params, found.num_chunks(), sums.data(), nullptr);
  optim::compute_grad_scaling_cuda(asked, {}, sums.data(), found.num_chunks(), &grad_scaling, nullptr);
  // A step that the host scales has no scaling on the device.
  const optim::GradScaling* const on_device = is_scaled_on_device ? &grad_scaling : nullptr;
  optim::start_cuda({rule.kind, table.data(), starts.data(), numbers.data(), rules.data(), num_params, num_params + 1,
                     on_device, records.empty() ? nullptr : records.data(), nullptr, grad_scaling},
                    nullptr);
  optim::StepJob job = found.job();
  job.params = table.data();
  job.rules = rules.data();
  job.num_rules = num_params;
  job.grad_scaling = grad_scaling;
  job.grad_scaling_on_device = on_device;
  for (const optim::StepLaunch& launch : plan.launches) {
    optim::step_kernel_cuda(launch, records.data(), plan.blocks.data(), nullptr);
  }
  if (plan.launches.empty()) optim::step_cuda(job, nullptr);

  const std::string name = text("CUDA, whole step of ", rule.name, ", ", layout.name);
  const double after = overflows ? kSteps : kSteps + 1;
  expect(counter == after && double_counter == after && empty_counter == after, text(name, ": counters"));
  for (size_t i = 0; i < starts.size(); ++i) {
    optim::Scalars scalars = before_step;
    for (bool& is_double : scalars.is_double) is_double = i == floats.size();
    // Only parameters with a counter advance.
    if (!overflows && starts[i].counter != nullptr) advance(rule.kind, fixed_hypers(), kSteps + 1, scalars);
    for (int s = 0; s < num_scalars; ++s) {
      const double value = i == floats.size() ? doubles[s] : floats[i][s];
      expect(value == scalars.value[s], text(name, ": scalar ", s, " of parameter ", i));
    }
  }
  if (!overflows) {
    expect(found.bytes() == expected.bytes(), text(name, ": other bytes than the CPU"));
    return;
  }
  // Checks that the gradients are zeros and puts them back, after which nothing may differ.
  for (const optim::ParamJob& param : params) {
    const auto* grad = static_cast<const unsigned char*>(param.grad.data);
    const int64_t bytes = param.numel * formats::bytes_of(layout.grad);
    expect(std::all_of(grad, grad + bytes, [](unsigned char byte) { return byte == 0; }), text(name, ": not zeroed"));
    std::memcpy(param.grad.data, expected.jobs()[&param - params.data()].grad.data, bytes);
  }
  expect(found.bytes() == before, text(name, ": an overflow has changed something"));
}

void test_whole_steps() {
  for (const int seed : cuda_on_cpu::kSeeds) {
    cuda_on_cpu::set_seed(seed);
    for (size_t which = 0; which < tested_rules().size(); ++which) {
      for (const Layout& layout : kLayouts) {
        const bool is_adam = tested_rules()[which].kind == optim::RuleKind::kAdam;
        const bool differs = layout.param == Format::kBFloat16Stochastic || layout.param == Format::kFloat64;
        if (!is_adam && (kOneRule || !differs)) continue;  // test_steps combines all rules and storage formats.
        test_whole_step(which, layout, false, seed == cuda_on_cpu::kSeeds[0]);
        if (is_adam) test_whole_step(which, layout, true, true);
      }
    }
  }
}

// Returns the rule's arguments, adapted to the sums of a parameter's norms.
optim::RuleArgs adapted(optim::RuleKind kind, const optim::RuleArgs& rule, const optim::TrustRatioSums& sums,
                        int64_t numel) {
  switch (kind) {
#define DT_CASE(Rule, ...)                           \
  case optim::RuleKind::k##Rule: {                   \
    auto args = rule.as<optim::Rule<float>::Args>(); \
    args.adapt(sums, numel);                         \
    return optim::RuleArgs::of(args);                \
  }
    DT_TRUST_RATIO_RULES(DT_CASE)
#undef DT_CASE
    default:
      return rule;
  }
}

// Adds up one parameter's sums over its chunks.
optim::TrustRatioSums trust_ratio_totals(const optim::StepJob& job, const optim::ParamJob& param) {
  formats::SumOfChunks of_param, of_direction;
  for (int64_t begin = 0; begin < param.numel; begin += formats::kChunk) {
    const optim::TrustRatioSums sums =
        optim::baseline::trust_ratio_sums_cpu(job, param, begin, std::min(begin + formats::kChunk, param.numel));
    of_param.add(sums.param);
    of_direction.add(sums.direction);
  }
  return {of_param.get(), of_direction.get()};
}

// Moves gradients to where no two elements can be loaded at once.
void move_gradients(std::vector<optim::ParamJob>& jobs, std::vector<std::vector<unsigned char>>& memory) {
  for (optim::ParamJob& job : jobs) {
    const int64_t bytes = formats::bytes_of(job.grad.format);
    std::vector<unsigned char>& moved = memory.emplace_back((job.numel + 1) * bytes);
    if (job.numel > 0) std::memcpy(moved.data() + bytes, job.grad.data, job.numel * bytes);
    job.grad.data = moved.data() + bytes;
  }
}

// Makes a step with trust ratios as optim/trust_ratio.cpp and optim/run_cuda.cpp do.
void test_layers(const TestedRule& rule, const Layout& layout, bool moves) {
  const std::vector<int64_t> sizes = {1, 257, 0, formats::kChunk + 33, 40};
  Params expected(rule, layout, sizes), found(rule, layout, sizes);
  std::vector<std::vector<unsigned char>> memory;
  if (moves) move_gradients(found.jobs(), memory);
  const auto num_params = static_cast<int32_t>(found.jobs().size());
  for (Params* params : {&expected, &found}) {
    for (int32_t i = 0; i < num_params; ++i) params->jobs()[i].rule = i;
  }
  std::vector<optim::RuleArgs> rules(num_params, rule.args), found_rules = rules;
  optim::StepJob job = expected.job();
  job.grad_scaling = {0.3, moves ? optim::GradAfter::kKeep : optim::GradAfter::kScaled};
  job.rules = rules.data();
  std::vector<optim::TrustRatioSums> totals;
  for (const optim::ParamJob& param : expected.jobs()) totals.push_back(trust_ratio_totals(job, param));
  for (int32_t i = 0; i < num_params; ++i) {
    rules[i] = adapted(rule.kind, rules[i], totals[i], expected.jobs()[i].numel);
  }
  optim::baseline::step_cpu(job, 0, job.total);

  const optim::GradScaling grad_scaling = job.grad_scaling;
  job = found.job();
  job.grad_scaling_on_device = &grad_scaling;
  job.rules = found_rules.data();
  std::vector<optim::TrustRatioSums> sums(found.num_chunks());
  optim::adapt_cuda(job, found.num_chunks(), sums.data(), found_rules.data(), nullptr);
  optim::step_cuda(job, nullptr);
  expect(found.bytes() == expected.bytes(), text("CUDA ", rule.name, ", ", layout.name, ": other bytes than the CPU"));
}

// Describes the matrices of one parameter, or a vector. kShapes has matrices smaller than a strip, several of them in
// one strip, and matrices higher and wider than a unit.
struct Shape {
  int64_t matrices, rows, columns;  // no rows: `columns` elements
};
const std::vector<Shape> kShapes = {{1, 1, 1},   {70, 3, 3},   {1, 0, 257},   {1, 1, 600}, {1, 600, 1},
                                    {3, 32, 31}, {9, 31, 33},  {2, 33, 40},   {1, 0, 1},   {1, 260, 300},
                                    {2, 300, 3}, {1, 32, 256}, {1, 1100, 20}, {5, 7, 8}};

class Matrices {
 public:
  Matrices(const Layout& layout, const std::vector<Shape>& shapes) {
    const Format state = formats::has_blocks(layout.state) ? Format::kFloat32 : layout.state;
    for (const Shape& shape : shapes) {
      const int64_t rows = shape.matrices * shape.rows, columns = shape.matrices * shape.columns;
      const int64_t numel = shape.rows > 0 ? rows * shape.columns : columns;
      std::vector<Block>& mine = blocks_.emplace_back();
      mine.emplace_back(layout.param, numel, 0);
      mine.emplace_back(layout.grad, numel, 1);
      optim::ParamJob job = {};
      if (shape.rows > 0) {
        mine.emplace_back(state, rows, 2);
        mine.emplace_back(state, columns, 3);
        job.state[1] = mine[2].stream();
        job.state[2] = mine[3].stream();
        job.rows = shape.rows;
        job.columns = shape.columns;
      } else {
        mine.emplace_back(state, numel, 2);
        job.state[0] = mine[2].stream();
      }
      job.param = mine[0].stream();
      job.grad = mine[1].stream();
      job.begin = total_;
      job.numel = numel;
      job.rule = static_cast<int32_t>(jobs_.size());
      total_ += numel;
      job.first_chunk = num_chunks_;
      num_chunks_ += formats::num_chunks(numel);
      jobs_.push_back(job);
    }
    factoring = optim::factoring_of(jobs_.data(), static_cast<int32_t>(jobs_.size()));
    memory_.assign(factoring.num_doubles, NAN);
    optim::place_factors(factoring, jobs_.data(), memory_.data());
    job.kind = optim::RuleKind::kAdafactor;
    job.in_double = layout.param == Format::kFloat64;
    job.params = jobs_.data();
    job.num_params = job.num_rules = static_cast<int32_t>(jobs_.size());
    job.total = total_;
  }

  std::vector<optim::ParamJob>& jobs() { return jobs_; }
  int64_t num_chunks() const { return num_chunks_; }

  // Returns the bytes of parameters, gradients and states.
  std::vector<unsigned char> bytes() const { return bytes_of(blocks_); }

  optim::StepJob job = {};
  optim::Factoring factoring;

 private:
  std::vector<std::vector<Block>> blocks_;
  std::vector<optim::ParamJob> jobs_;
  std::vector<double> memory_;
  int64_t total_ = 0, num_chunks_ = 0;
};

// Makes Adafactor's step as optim/adafactor.cpp does on the CPU and optim/run_cuda.cpp on CUDA.
void test_factored(const Layout& layout, const optim::GradScaling& grad_scaling, bool moves = false) {
  constexpr double kSteps = 6;
  constexpr uint64_t kSeed = 5;
  const std::string name = text("CUDA adafactor, ", layout.name);
  Matrices expected(layout, kShapes), found(layout, kShapes);
  std::vector<std::vector<unsigned char>> memory;
  if (moves) move_gradients(found.jobs(), memory);
  std::vector<optim::RuleArgs> rules;
  for (optim::ParamJob& param : expected.jobs()) {
    auto args = optim::AdafactorArgs::make(fixed_hypers(), kSteps + 1);
    if (param.rows > 0) args.fit(param.rows, param.columns);
    rules.push_back(optim::RuleArgs::of(args));
    param.key = formats::random_key(kSeed, kSteps);
  }
  optim::StepJob job = expected.job;
  job.grad_scaling = grad_scaling;
  job.rules = rules.data();
  for (const optim::Factored& of : expected.factoring.matrices) {
    for (int64_t unit = 0; unit < optim::num_units(of); ++unit) optim::baseline::adafactor_sums_cpu(job, of, unit);
    optim::baseline::adafactor_update_cpu(job, of, 0, of.matrices);
  }
  for (size_t i = 0; i < rules.size(); ++i) {
    rules[i] = adapted(job.kind, rules[i], trust_ratio_totals(job, expected.jobs()[i]), expected.jobs()[i].numel);
  }
  optim::baseline::step_cpu(job, 0, job.total);

  std::vector<float> counters(rules.size(), kSteps);
  std::vector<optim::ParamStart> starts;
  for (float& counter : counters) starts.push_back({&counter, false, true, 0, 0, kSeed});
  const optim::GroupNumbers numbers = {fixed_hypers(), nullptr, false};
  const std::vector<unsigned char> before = found.bytes();
  const auto step = [&](const optim::GradScaling& of_gradients) {
    std::vector<optim::RuleArgs> found_rules(rules.size());
    std::vector<optim::TrustRatioSums> sums(found.num_chunks());
    optim::StepJob job = found.job;
    job.grad_scaling_on_device = &of_gradients;
    job.rules = found_rules.data();
    cuda_on_cpu::num_launches = 0;
    optim::start_cuda({job.kind, found.jobs().data(), starts.data(), &numbers, found_rules.data(), job.num_params,
                       job.num_params, &of_gradients},
                      nullptr);
    const auto& matrices = found.factoring.matrices;
    optim::factor_cuda(job, matrices.data(), static_cast<int32_t>(matrices.size()), found.factoring.num_units,
                       found.factoring.num_blocks, nullptr);
    optim::adapt_cuda(job, found.num_chunks(), sums.data(), found_rules.data(), nullptr);
    optim::step_cuda(job, nullptr);
    expect(cuda_on_cpu::num_launches == 7, text(name, ": ", cuda_on_cpu::num_launches, " launches"));
  };
  optim::GradScaling skipping = grad_scaling;
  skipping.skips = true;
  skipping.after = optim::GradAfter::kKeep;
  step(skipping);
  expect(found.bytes() == before && counters[0] == kSteps, text(name, ": a step that is left out changes something"));
  step(grad_scaling);
  expect(found.bytes() == expected.bytes(), text(name, ": other bytes than the CPU"));
}

// Makes both passes of Muon as optim/muon.cpp and optim/run_cuda.cpp do, but takes the momentum for the iteration's
// result.
void test_muon(const TestedRule& rule, const Layout& layout, optim::GradScaling grad_scaling) {
  constexpr double kSteps = 4;
  constexpr uint64_t kSeed = 5;
  Params expected(rule, layout, kSizes), found(rule, layout, kSizes);
  const std::vector<unsigned char> before = found.bytes();
  std::vector<optim::RuleArgs> rules;
  std::vector<std::vector<uint16_t>> results[2];  // of the iteration
  // Returns the jobs of the momentum pass, and turns the parameters' jobs into those of the step.
  const auto momenta_of = [](Params& params, std::vector<std::vector<uint16_t>>& memory) {
    std::vector<optim::ParamJob> momenta;
    for (optim::ParamJob& job : params.jobs()) {
      job.rule = static_cast<int32_t>(momenta.size());
      job.rows = job.numel;
      job.columns = 1;
      memory.emplace_back(job.numel);
      momenta.push_back(job);
      momenta.back().param = job.grad = {memory.back().data(), Format::kBFloat16};
    }
    return momenta;
  };
  std::vector<optim::ParamJob> momenta = momenta_of(expected, results[0]);
  for (optim::ParamJob& param : expected.jobs()) {
    auto args = optim::MuonArgs::make(fixed_hypers(), 1);
    args.fit(param.rows, param.columns);
    rules.push_back(optim::RuleArgs::of(args));
    param.key = formats::random_key(kSeed, kSteps);
  }
  optim::StepJob job = expected.job();
  job.rules = rules.data();
  if (!grad_scaling.skips) {
    job.grad_scaling = grad_scaling;
    job.params = momenta.data();
    optim::baseline::step_cpu(job, 0, job.total);
    job.kind = optim::RuleKind::kMuonStep;
    job.grad_scaling = {};
    job.params = expected.jobs().data();
    optim::baseline::step_cpu(job, 0, job.total);
  }

  momenta = momenta_of(found, results[1]);
  std::vector<float> counters(rules.size(), kSteps);
  std::vector<optim::ParamStart> starts;
  for (float& counter : counters) starts.push_back({&counter, false, false, 0, 1, kSeed});
  const optim::GroupNumbers numbers = {fixed_hypers(), nullptr, false};
  std::vector<optim::RuleArgs> found_rules(rules.size());
  job = found.job();
  job.grad_scaling_on_device = &grad_scaling;
  job.rules = found_rules.data();
  optim::start_cuda({job.kind, found.jobs().data(), starts.data(), &numbers, found_rules.data(), job.num_params,
                     job.num_params, &grad_scaling},
                    nullptr);
  job.params = momenta.data();
  optim::step_cuda(job, nullptr);
  job.kind = optim::RuleKind::kMuonStep;
  job.only_skips = true;
  job.params = found.jobs().data();
  optim::step_cuda(job, nullptr);
  const std::string name = text("CUDA muon, both passes, ", layout.name);
  expect(counters[0] == kSteps + (grad_scaling.skips ? 0 : 1), text(name, ": counters"));
  expect(grad_scaling.skips || results[0] == results[1], text(name, ": the step writes the iteration's results"));
  expect(found.bytes() == (grad_scaling.skips ? before : expected.bytes()), text(name, ": other bytes than the CPU"));
}

}  // namespace

void test_cuda_kernels() {
  test_steps();
  test_norm();
  test_norm_of_views();
  test_accumulations();
  test_grad_scaling();
  test_whole_steps();
  for (const int seed : cuda_on_cpu::kSeeds) {
    cuda_on_cpu::set_seed(seed);
    for (const TestedRule& rule : layer_rules()) {
      for (const Layout& layout : kLayouts) {
        test_layers(rule, layout, /*moves=*/false);
        if (!kOneRule) test_layers(rule, layout, /*moves=*/true);
      }
    }
    for (const Layout& layout : kLayouts) {
      if (kOneRule && layout.param != Format::kFloat32) continue;
      test_factored(layout, {0.3, optim::GradAfter::kScaled});
      if (!kOneRule) test_factored(layout, {0.3, optim::GradAfter::kKeep}, /*moves=*/true);
    }
    test_factored(kLayouts[0], {1, optim::GradAfter::kZero});
    for (const TestedRule& rule : tested_rules()) {
      if (rule.kind != optim::RuleKind::kMuonMomentum) continue;
      for (const Layout& layout : kLayouts) test_muon(rule, layout, {0.3, optim::GradAfter::kScaled});
      test_muon(rule, kLayouts[0], {1, optim::GradAfter::kZero});
      test_muon(rule, kLayouts[0], {0.3, optim::GradAfter::kScaled, /*skips=*/true});
    }
  }
}

}  // namespace drivetrain
