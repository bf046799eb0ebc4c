// Tests the specialized kernels of a CUDA step on the CPU (cuda_on_cpu/): their plan, and the bytes of the CPU's loops.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "formats/ranged_float.cuh"
#include "native_tests.h"
#include "optim/cuda_step.h"
#include "step_blocks.h"

namespace drivetrain {
namespace {

using formats::bits_as;

#if defined(__SANITIZE_THREAD__)
constexpr bool kFew = true;  // a fiber costs much there
#else
constexpr bool kFew = false;
#endif

struct KernelRow {
  TestedRule rule;
  Layout layout;
};

std::vector<KernelRow> kernel_rows() {
  std::vector<KernelRow> rows;
  for (const TestedRule& rule : tested_rules()) {
#define DT_ROW(Rule, param, grad, state)     \
  if (rule.kind == optim::RuleKind::k##Rule) \
    rows.push_back({rule, {#param "/" #grad "/" #state, Format::param, Format::grad, Format::state}});
    DT_STEP_KERNELS(DT_ROW)
#undef DT_ROW
  }
  return rows;
}

optim::StepRecord record_of(optim::RuleKind kind, const optim::ParamJob& param, const optim::RuleArgs& args,
                            const optim::GradScaling& grad_scaling) {
  switch (kind) {
#define DT_CASE(Rule)                                                                                         \
  case optim::RuleKind::k##Rule:                                                                              \
    return optim::record_of(param, optim::rule_from<optim::Rule<float>>(args.as<optim::Rule<float>::Args>()), \
                            grad_scaling);
    DT_CASE(Adam)
    DT_CASE(Sgd)
    DT_CASE(SgdMomentum)
    DT_CASE(Adagrad)
    DT_CASE(Rmsprop)
    DT_CASE(Lion)
#undef DT_CASE
    default:
      return {};
  }
}

// Names the values of an array: usual ones, zeros, special ones, or a few special ones among usual ones.
enum class Values { kUsual, kZero, kSpecial, kMixed };

// Holds an array that begins `offset` elements behind an aligned address. Nothing may change the bytes around it.
class Memory {
 public:
  Memory(Format format, int64_t numel, int64_t offset, int seed, Values values) : format_(format), numel_(numel) {
    const int64_t size = formats::bytes_of(format);
    const Block block(format, numel, seed);
    values_ = place(block.bytes, offset * size);
    if (!block.extra.empty()) {
      const int64_t of_extra = formats::has_blocks(format) ? 0 : offset * extra_bytes_of(format, 1);
      extra_ = place(block.extra, of_extra);
    }
    if (values == Values::kUsual) return;
    uint32_t random = static_cast<uint32_t>(seed) * 7919u + 1;
    for (int64_t i = 0; i < numel; ++i) {
      random = random * 1664525u + 1013904223u;
      if (values == Values::kMixed && random >> 24 != 0) continue;
      put_special(i, values == Values::kZero ? 0 : random >> 8);
    }
  }

  formats::TypedArray stream() { return {values_.begin(), format_, extra_.bytes.empty() ? nullptr : extra_.begin()}; }

  bool operator==(const Memory& other) const {
    for (const Bytes* bytes : {&values_, &extra_, &other.values_, &other.extra_}) {
      if (!bytes->is_kept_around()) return false;
    }
    if (!extra_.has_same_content(other.extra_)) return false;
    for (int64_t i = 0; i < numel_; ++i) {
      if (!is_same(i, other)) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kAround = 0xc3;
  struct Bytes {
    std::vector<unsigned char> bytes;
    size_t first = 0, size = 0;
    unsigned char* begin() { return bytes.data() + first; }
    const unsigned char* begin() const { return bytes.data() + first; }
    // Returns whether the bytes around the content are unchanged.
    bool is_kept_around() const {
      const auto is_kept = [](unsigned char byte) { return byte == kAround; };
      return std::all_of(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(first), is_kept) &&
             std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(first + size), bytes.end(), is_kept);
    }
    bool has_same_content(const Bytes& other) const {
      return size == other.size && std::equal(begin(), begin() + size, other.begin());
    }
  };

  static Bytes place(const std::vector<unsigned char>& content, int64_t offset) {
    constexpr size_t kAlignment = 64, kBehind = 64;
    Bytes result;
    result.bytes.assign(content.size() + 2 * kAlignment + kBehind, kAround);
    const size_t misaligned = reinterpret_cast<uintptr_t>(result.bytes.data()) % kAlignment;
    result.first = (kAlignment - misaligned) % kAlignment + static_cast<size_t>(offset);
    result.size = content.size();
    std::copy(content.begin(), content.end(), result.begin());
    return result;
  }

  void put_special(int64_t i, uint32_t random) {
    constexpr uint32_t kFloats[] = {0,           0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x00000001u,
                                    0x807fffffu, 0x00800000u, 0x7f7fffffu, 0x0d800000u, 0x4b800000u, 0x2b8cbcccu};
    const uint32_t bits = random == 0 ? 0 : kFloats[random % std::size(kFloats)] ^ (random % 5 == 0 ? random << 8 : 0);
    switch (formats::bytes_of(format_)) {
      case 4:
        std::memcpy(values_.begin() + 4 * i, &bits, 4);
        break;
      case 2: {
        const auto half = static_cast<uint16_t>(bits >> 16);
        std::memcpy(values_.begin() + 2 * i, &half, 2);
        break;
      }
      default:
        values_.begin()[i] = static_cast<unsigned char>(random);
    }
    if (formats::has_blocks(format_)) {
      if (random != 0) extra_.begin()[i / formats::kBlock * 4 + 3] |= 0x80;  // as a block with such codes has it
    } else if (!extra_.bytes.empty()) {
      const int64_t size = extra_bytes_of(format_, 1);
      for (int64_t byte = 0; byte < size; ++byte)
        extra_.begin()[i * size + byte] = static_cast<unsigned char>(random >> (8 * byte));
    }
  }

  // Treats all NaNs as equal.
  bool is_same(int64_t i, const Memory& other) const {
    const int64_t size = formats::bytes_of(format_);
    const unsigned char *a = values_.begin() + i * size, *b = other.values_.begin() + i * size;
    if (std::memcmp(a, b, size) == 0) return true;
    if (size == 1) return false;
    const auto is_nan = [size](const unsigned char* from) {
      uint32_t bits = 0;
      std::memcpy(size == 4 ? reinterpret_cast<unsigned char*>(&bits) : reinterpret_cast<unsigned char*>(&bits) + 2,
                  from, size);
      return (bits & 0x7fffffffu) > formats::kInfinity;
    };
    return is_nan(a) && is_nan(b);
  }

  Format format_;
  int64_t numel_;
  Bytes values_, extra_;
};

struct Shape {
  int64_t numel, offset;
};

class Tested {
 public:
  Tested(const KernelRow& row, const std::vector<Shape>& shapes, Values values) : rule_(row.rule) {
    memory_.reserve(shapes.size() * 5);
    int64_t total = 0;
    for (const Shape& shape : shapes) {
      optim::ParamJob job = {};
      const auto add = [&](Format format, int seed) {
        memory_.emplace_back(format, shape.numel, shape.offset, seed, values);
        return memory_.back().stream();
      };
      job.param = add(row.layout.param, 0);
      job.grad = add(row.layout.grad, 1);
      for (int s = 0; s < row.rule.num_states; ++s) {
        job.state[s] = add(state_format_of(row.layout, row.rule.squared[s]), 2 + s);
      }
      job.begin = num_blocks(total) * formats::kBlock;
      job.numel = shape.numel;
      total = job.begin + shape.numel;
      if (shape.numel > 0) jobs_.push_back(job);
    }
    job_.kind = rule_.kind;
    job_.params = jobs_.data();
    job_.num_params = static_cast<int32_t>(jobs_.size());
    job_.rules = &rule_.args;
    job_.num_rules = 1;
    job_.total = total;
  }
  Tested(const Tested&) = delete;

  void step_on_cpu(const optim::GradScaling& grad_scaling) {
    job_.grad_scaling = grad_scaling;
    optim::baseline::step_cpu(job_, 0, job_.total);
  }

  // Returns whether the plan has a specialized kernel for the step.
  bool step_on_cuda(const optim::GradScaling& grad_scaling) {
    const optim::StepPlan plan = optim::plan_step(rule_.kind, false, jobs_.data(), job_.num_params);
    std::vector<optim::StepRecord> records;
    for (const optim::ParamJob& param : jobs_)
      records.push_back(record_of(rule_.kind, param, rule_.args, grad_scaling));
    for (const optim::StepLaunch& launch : plan.launches) {
      optim::step_kernel_cuda(launch, records.data(), plan.blocks.data(), nullptr);
    }
    return !plan.launches.empty();
  }

  bool operator==(const Tested& other) const { return memory_ == other.memory_; }

 private:
  TestedRule rule_;
  std::vector<Memory> memory_;
  std::vector<optim::ParamJob> jobs_;
  optim::StepJob job_ = {};
};

std::vector<Shape> all_shapes() {
  std::vector<Shape> shapes = {{0, 0},   {1, 0},    {3, 0},    {2048, 0}, {64, 0},   {65, 0},    {255, 0},
                               {257, 0}, {1283, 0}, {4101, 0}, {64, 1},   {130, 3},  {2560, 1},  {700, 4},
                               {256, 8}, {129, 8},  {16, 0},   {5000, 8}, {2048, 2}, {12288, 0}, {31, 5}};
  for (int64_t i = 0; i < 40; ++i) shapes.push_back({64 + i % 3, i % 7 == 0 ? 1 : 0});  // small ones in a row
  return shapes;
}

void test_bytes() {
  const std::vector<Shape> shapes = kFew ? std::vector<Shape>{{64, 0}, {257, 0}, {2200, 0}, {65, 1}} : all_shapes();
  const optim::GradScaling plain = {}, treated = {0.3, optim::GradAfter::kScaled},
                           zeroed = {0.7, optim::GradAfter::kZero},
                           skipped = {1, optim::GradAfter::kZero, /*skips=*/true};
  for (const KernelRow& row : kernel_rows()) {
    if (kFew && row.rule.kind != optim::RuleKind::kAdam) continue;
    struct Case {
      optim::GradScaling grad_scaling;
      Values values;
    };
    for (const Case& run : {Case{plain, Values::kUsual}, Case{plain, Values::kSpecial}, Case{treated, Values::kMixed},
                            Case{zeroed, Values::kMixed}, Case{zeroed, Values::kZero}}) {
      if (kFew && run.values != Values::kMixed) continue;
      Tested expected(row, shapes, run.values), found(row, shapes, run.values);
      expected.step_on_cpu(run.grad_scaling);
      const std::string name = text("CUDA kernel of ", row.rule.name, ", ", row.layout.name, ", values ",
                                    static_cast<int>(run.values), ", factor ", run.grad_scaling.factor);
      expect(found.step_on_cuda(run.grad_scaling), text(name, ": there is none"));
      expect(found == expected, text(name, ": other bytes than the CPU"));
    }
    Tested before(row, shapes, Values::kUsual), found(row, shapes, Values::kUsual);
    found.step_on_cuda({1, optim::GradAfter::kKeep, /*skips=*/true});
    expect(found == before, text("CUDA kernel of ", row.rule.name, ": a step that is left out changes something"));
    found.step_on_cuda(skipped);
    expect(!(found == before), text("CUDA kernel of ", row.rule.name, ": gradients are zeroed"));
  }
}

// Steps numbers of parameters around the limits of a warp's search, and counts launches and blocks.
void test_plan() {
  const KernelRow row = kernel_rows()[0];
  for (const int64_t number : {1, 2, 31, 32, 33, 1023, 1025, 3000}) {
    if (kFew && number > 33) continue;
    std::vector<Shape> shapes(static_cast<size_t>(number), {1, 0});
    for (size_t i = 0; i < shapes.size(); i += 2) shapes[i].numel = 300;
    Tested expected(row, shapes, Values::kUsual), found(row, shapes, Values::kUsual);
    expected.step_on_cpu({});
    found.step_on_cuda({});
    expect(found == expected, text("CUDA kernel of ", number, " parameters: other bytes than the CPU"));
  }

  std::vector<optim::ParamJob> params(40);
  for (optim::ParamJob& param : params) {
    param.param.format = param.grad.format = Format::kFloat32;
    param.state[0].format = param.state[1].format = Format::kFloat32;
    param.numel = 64;
  }
  const auto plan = [&](bool in_double = false) {
    return optim::plan_step(optim::RuleKind::kAdam, in_double, params.data(), static_cast<int32_t>(params.size()));
  };
  expect(plan().launches.size() == 1 && plan().launches[0].num_blocks == 3, "16 small parameters share a block");
  params[20].numel = 5000;
  expect(plan().launches[0].num_blocks == 2 + 3 + 2, "a larger one has blocks of its own");
  params[20].numel = (int64_t{1} << 31) + 1;
  expect(plan().launches[0].num_blocks == 2 + (1 << 20) + 1 + 2, "so has one of more than 2^31 elements");
  params[30].param.format = params[30].grad.format = Format::kBFloat16;
  expect(plan().launches.size() == 2, "every set of formats has a launch");
  params[30].grad.format = Format::kFloat16;
  expect(plan().launches.size() == 1 && plan().others == std::vector<int32_t>{30}, "what has no kernel is named");
  for (optim::ParamJob& param : params) param.grad.format = Format::kFloat16;
  expect(plan().launches.empty() && plan(true).launches.empty() && plan().others.empty(),
         "where nothing has a kernel, all formats are chosen at run time");
}

// Compares division and square root with the instructions, while the approximations are off by up to an ulp.
void test_ranged_floats() {
  uint32_t state = 1;
  const auto next = [&state] {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
  };
  const auto is_same = [](float a, float b) { return bits_as<uint32_t>(a) == bits_as<uint32_t>(b); };
  const auto divides = [](formats::RangedFloat root) {
    return (formats::RangedFloat(1) / (root + formats::RangedFloat(1e-8f))).met.is_right();
  };
  bool roots = true, quotients = true;
  int64_t in_range = 0;
  for (int i = 0; i < (kFew ? 100000 : 2000000); ++i) {
    // The exponents lie in and around the range.
    const uint32_t bits = (next() & 0x807fffffu) | (20u + next() % 160u) << 23;
    const float a = bits_as<float>(bits), b = bits_as<float>((next() & 0x007fffffu) | (20u + next() % 140u) << 23);
    const formats::RangedFloat root = formats::square_root(formats::RangedFloat(a));
    roots &= !root.met.is_right() || is_same(root.value, std::sqrt(a)) || !divides(root);
    const formats::RangedFloat quotient = formats::RangedFloat(a) / formats::RangedFloat(b);
    quotients &= !quotient.met.is_right() || is_same(quotient.value, a / b);
    in_range += quotient.met.is_right() && root.met.is_right();
  }
  expect(roots, "a square root has the instruction's bits");
  expect(quotients, "a quotient has the instruction's bits");
  expect(in_range > 10000, "many are in range");
  for (const uint32_t bits : {0x80000000u, 1u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xbf800000u}) {
    expect(!divides(formats::square_root(formats::RangedFloat(bits_as<float>(bits)))),
           "a division by an unusual root is out of range");
  }
  for (const float zero : {0.0f, -0.0f}) {
    const formats::RangedFloat quotient = formats::RangedFloat(zero) / formats::RangedFloat(0.5f);
    expect(quotient.met.is_right() && is_same(quotient.value, zero), "a zero keeps its sign");
  }
  expect(formats::square_root(formats::RangedFloat(0.0f)).met.is_right(), "the root of zero is in range");
}

}  // namespace

void test_step_kernels() {
  test_ranged_floats();
  test_plan();
  test_bytes();
}

}  // namespace drivetrain
