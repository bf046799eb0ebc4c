// Defines the parameters that native tests step, in any size and format, in memory of exactly that size.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "formats/convert.h"
#include "formats/summation.h"
#include "optim/step.h"

namespace drivetrain {

using formats::Format;

inline int64_t num_blocks(int64_t numel) { return (numel + formats::kBlock - 1) / formats::kBlock; }

// Returns hyper-parameters that suit every rule.
inline optim::Hypers fixed_hypers() {
  optim::Hypers hypers = {};
#define DT_ZERO(name) hypers.name = 0;
  DT_HYPERS(DT_ZERO)
#undef DT_ZERO
  hypers.lr = 0.1;
  hypers.beta1 = hypers.momentum = 0.9;
  hypers.beta2 = 0.99;
  hypers.eps = 1e-8;
  hypers.weight_decay = 0.01;
  hypers.decoupled_weight_decay = 1;
  hypers.d = hypers.bias_correction = hypers.grad_averaging = 1;
  hypers.eps1 = hypers.eps2 = 1e-3;
  hypers.beta2_decay = -0.8;
  hypers.dampening = 0.25;
  hypers.lr_decay = 0.1;
  hypers.rho = 0.9;
  hypers.momentum_decay = 4e-3;
  hypers.lambd = 1e-4;
  hypers.average_decay = 0.75;
  hypers.t0 = 1;
  hypers.eta_minus = 0.5;
  hypers.eta_plus = 1.2;
  hypers.step_size_min = 1e-6;
  hypers.step_size_max = 50;
  hypers.clips = 1;
  hypers.warmup_steps = 10;
  hypers.r = 0.5;
  hypers.weight_lr_power = 2;
  return hypers;
}

// Returns scalars that suit every rule.
inline optim::Scalars fixed_scalars() { return {{0.75, 0.5}, {}}; }

// Returns the bytes that a format stores beside its values.
inline int64_t extra_bytes_of(Format format, int64_t numel) {
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
    case Format::kSignedFloat8:
    case Format::kSquaredFloat8:
    case Format::kSigned4:
    case Format::kSquared4:
      return formats::num_scales(format, numel) * 4;
    default:
      return 0;
  }
}

// Holds an array in memory of exactly its size, so that the address sanitizer sees any access beyond it.
struct Block {
  std::vector<unsigned char> bytes;
  std::vector<unsigned char> extra;
  Format format;

  Block(Format f, int64_t numel, int seed)
      : bytes(formats::data_bytes(f, numel)), extra(extra_bytes_of(f, numel)), format(f) {
    if (numel == 0) return;
    std::vector<double> values(numel);
    for (int64_t i = 0; i < numel; ++i) values[i] = static_cast<double>((i * 37 + seed * 11) % 101 + 1) / 64;
    if (format == Format::kFloat64) {
      std::memcpy(bytes.data(), values.data(), bytes.size());
      return;
    }
    std::vector<float> floats(values.begin(), values.end());
    formats::baseline::convert_cpu({floats.data(), Format::kFloat32}, stream(), numel, /*key=*/7);
  }
  formats::TypedArray stream() { return {bytes.data(), format, extra.empty() ? nullptr : extra.data()}; }
};

// Returns the bytes of all blocks, one after another.
inline std::vector<unsigned char> bytes_of(const std::vector<std::vector<Block>>& blocks) {
  std::vector<unsigned char> result;
  for (const auto& mine : blocks) {
    for (const Block& block : mine) {
      result.insert(result.end(), block.bytes.begin(), block.bytes.end());
      result.insert(result.end(), block.extra.begin(), block.extra.end());
    }
  }
  return result;
}

// Names the formats of one step's arrays. kSigned8, kSignedFloat8 and kSigned4 as `state` stand for the formats that
// fit each state.
struct Layout {
  const char* name;
  Format param, grad, state;
};
inline const std::vector<Layout> kLayouts = {
    {"float32", Format::kFloat32, Format::kFloat32, Format::kFloat32},
    {"float64", Format::kFloat64, Format::kFloat64, Format::kFloat64},
    {"bfloat16", Format::kBFloat16, Format::kBFloat16, Format::kBFloat16},
    {"float16", Format::kFloat16, Format::kFloat16, Format::kFloat16},
    {"remainder of 16 bits, codes", Format::kBFloat16Remainder16, Format::kBFloat16, Format::kSigned8},
    {"remainder of 8 bits, codes", Format::kBFloat16Remainder8, Format::kBFloat16, Format::kSigned8},
    {"bfloat16 with compensation", Format::kBFloat16Kahan, Format::kFloat32, Format::kBFloat16},
    {"float16 with compensation", Format::kFloat16Kahan, Format::kFloat16, Format::kFloat32},
    {"float16 with master", Format::kFloat16Master, Format::kFloat16, Format::kSigned8},
    {"remainder of 16 bits, float8", Format::kBFloat16Remainder16, Format::kBFloat16, Format::kSignedFloat8},
    {"remainder of 8 bits, 4-bit codes", Format::kBFloat16Remainder8, Format::kBFloat16, Format::kSigned4},
    {"bfloat16 at random", Format::kBFloat16Stochastic, Format::kBFloat16, Format::kSigned8},
    {"float16 at random", Format::kFloat16Stochastic, Format::kFloat16, Format::kFloat16},
};

// Returns the format of a state under a layout.
inline Format state_format_of(const Layout& layout, bool is_squared) {
  if (is_squared && layout.state == Format::kSigned8) return Format::kSquared8;
  if (is_squared && layout.state == Format::kSignedFloat8) return Format::kSquaredFloat8;
  if (is_squared && layout.state == Format::kSigned4) return Format::kSquared4;
  return layout.state;
}

// Describes a rule with its arguments and states.
struct TestedRule {
  const char* name;
  optim::RuleKind kind;
  optim::RuleArgs args;
  int num_states;
  const bool* squared;  // per state: whether it is a mean or sum of squares
};

// Returns all rules with their arguments for the given step.
inline std::vector<TestedRule> tested_rules(double step = 3) {
  const optim::Hypers hypers = fixed_hypers();
  return {
#define DT_ROW(Rule, name, ...)                                                                    \
  {name, optim::RuleKind::k##Rule,                                                                 \
   optim::RuleArgs::of(optim::make_args<optim::Rule<float>::Args>(hypers, step, fixed_scalars())), \
   optim::Rule<float>::kNumStates, optim::Rule<float>::kSquared},
      DT_OPTIM_RULES(DT_ROW)
#undef DT_ROW
  };
}

template <class Args>
int num_scalars() {
  if constexpr (optim::kHasScalars<Args>) return Args::kNumScalars;
  return 0;
}

template <class Args>
void advance(const optim::Hypers& hypers, double step, optim::Scalars& scalars) {
  if constexpr (optim::kHasScalars<Args>) Args::advance(hypers, step, scalars);
}

// Returns the number of scalars that a rule keeps.
inline int num_scalars_of(optim::RuleKind kind) {
  switch (kind) {
#define DT_CASE(Rule, ...)       \
  case optim::RuleKind::k##Rule: \
    return num_scalars<optim::Rule<float>::Args>();
    DT_OPTIM_RULES(DT_CASE)
#undef DT_CASE
    default:
      return 0;
  }
}

// Advances the scalars of a rule by one step, on the CPU.
inline void advance(optim::RuleKind kind, const optim::Hypers& hypers, double step, optim::Scalars& scalars) {
  switch (kind) {
#define DT_CASE(Rule, ...)       \
  case optim::RuleKind::k##Rule: \
    return advance<optim::Rule<float>::Args>(hypers, step, scalars);
    DT_OPTIM_RULES(DT_CASE)
#undef DT_CASE
    default:
      return;
  }
}

// Returns the rules that have trust ratios, with their arguments for the third step.
inline std::vector<TestedRule> layer_rules() {
  const optim::Hypers hypers = fixed_hypers();
  return {
#define DT_ROW(Rule, name, ...)                                                                    \
  {name, optim::RuleKind::k##Rule, optim::RuleArgs::of(optim::Rule<float>::Args::make(hypers, 3)), \
   optim::Rule<float>::kNumStates, optim::Rule<float>::kSquared},
      DT_TRUST_RATIO_RULES(DT_ROW)
#undef DT_ROW
  };
}

// Holds parameters of the given sizes, always with the same values.
class Params {
 public:
  Params(const TestedRule& rule, const Layout& layout, const std::vector<int64_t>& sizes)
      : rule_(rule), layout_(layout) {
    for (int64_t numel : sizes) {
      std::vector<Block>& mine = blocks_.emplace_back();
      for (int b = 0; b < 2 + rule.num_states; ++b) {
        mine.emplace_back(b == 0   ? layout.param
                          : b == 1 ? layout.grad
                                   : state_format_of(layout, rule.squared[b - 2]),
                          numel, b);
      }
      optim::ParamJob job = {};
      job.param = mine[0].stream();
      job.grad = mine[1].stream();
      for (int s = 0; s < rule.num_states; ++s) job.state[s] = mine[2 + s].stream();
      job.begin = total_ = num_blocks(total_) * formats::kBlock;
      job.numel = numel;
      job.key = numel * 0x9e3779b97f4a7c15u;
      total_ += numel;
      job.first_chunk = num_chunks_;
      num_chunks_ += formats::num_chunks(numel);
      if (numel > 0) jobs_.push_back(job);
    }
  }

  // Returns the job of one step of all parameters.
  optim::StepJob job() const {
    optim::StepJob job = {};
    job.kind = rule_.kind;
    job.in_double = layout_.param == Format::kFloat64;
    job.params = jobs_.data();
    job.num_params = static_cast<int32_t>(jobs_.size());
    job.rules = &rule_.args;
    job.num_rules = 1;
    job.total = total_;
    return job;
  }

  std::vector<optim::ParamJob>& jobs() { return jobs_; }
  const std::vector<optim::ParamJob>& jobs() const { return jobs_; }
  int64_t num_chunks() const { return num_chunks_; }

  std::vector<unsigned char> bytes() const { return bytes_of(blocks_); }

 private:
  TestedRule rule_;
  Layout layout_;
  std::vector<std::vector<Block>> blocks_;
  std::vector<optim::ParamJob> jobs_;
  int64_t total_ = 0, num_chunks_ = 0;
};

}  // namespace drivetrain
