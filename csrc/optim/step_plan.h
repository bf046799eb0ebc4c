// Plans a CUDA step: which parameters have a kernel specialized to their storage formats, and which blocks take them.
// Needs no torch header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "optim/step.h"

namespace drivetrain::optim {

// The specialized kernels: X(rule, formats of the parameter, its gradient and its states). kSigned8 stands for 8-bit
// codes, which are kSquared8 for states that are means of squares. A rule without states names its gradient's format.
// Other combinations choose formats at run time (loop_cuda.cuh). The compressed layouts keep float32 states for vectors
// and small parameters, so they need the rows with these too.
#define DT_STEP_KERNELS(X)                            \
  X(Adam, kFloat32, kFloat32, kFloat32)               \
  X(Adam, kBFloat16, kBFloat16, kFloat32)             \
  X(Adam, kBFloat16, kBFloat16, kBFloat16)            \
  X(Adam, kBFloat16Remainder16, kBFloat16, kFloat32)  \
  X(Adam, kBFloat16Remainder8, kBFloat16, kFloat32)   \
  X(Adam, kBFloat16Remainder16, kFloat32, kFloat32)   \
  X(Adam, kFloat16Master, kFloat16, kFloat32)         \
  X(Adam, kBFloat16Remainder16, kBFloat16, kBFloat16) \
  X(Adam, kBFloat16Remainder16, kBFloat16, kSigned8)  \
  X(Adam, kBFloat16Remainder8, kBFloat16, kSigned8)   \
  X(Adam, kFloat32, kFloat32, kSigned8)               \
  X(Sgd, kFloat32, kFloat32, kFloat32)                \
  X(Sgd, kBFloat16, kBFloat16, kBFloat16)             \
  X(SgdMomentum, kFloat32, kFloat32, kFloat32)        \
  X(SgdMomentum, kBFloat16, kBFloat16, kBFloat16)     \
  X(Adagrad, kFloat32, kFloat32, kFloat32)            \
  X(Adagrad, kBFloat16, kBFloat16, kBFloat16)         \
  X(Rmsprop, kFloat32, kFloat32, kFloat32)            \
  X(Rmsprop, kBFloat16, kBFloat16, kBFloat16)         \
  X(Lion, kFloat32, kFloat32, kFloat32)               \
  X(Lion, kBFloat16, kBFloat16, kBFloat16)

constexpr int kMaxStatesOfKernels = 2;

constexpr int64_t kBlockElements = 2048;  // elements of a larger parameter per block of threads
constexpr int kLanesOfSmall = 16;         // threads per small parameter; 8-bit states need a whole warp
constexpr int kStepThreads = 256;

// Returns the largest number of elements of a small parameter; a block takes several of those.
constexpr int small_param(bool has_codes, int64_t grad_bytes) { return has_codes || grad_bytes == 4 ? 256 : 128; }

// Returns how many consecutive elements a lane takes at once. Kernels count them in 32 bits.
DT_HOST_DEVICE constexpr int step_unit(bool has_codes, int64_t grad_bytes, int64_t state_bytes) {
  return has_codes || grad_bytes == 4 || state_bytes == 4 ? 4 : 8;
}
constexpr int64_t kMostStepElements = int64_t{1} << 33;

// Returns the bytes per element of a parameter's `extra`, in the formats with kernels.
DT_HOST_DEVICE constexpr int step_extra_bytes(Format param) {
  return param == Format::kBFloat16Remainder16  ? 2
         : param == Format::kBFloat16Remainder8 ? 1
         : param == Format::kFloat16Master      ? 4
                                                : 0;
}

// All that a specialized kernel knows of one parameter: one line of the cache, which half a warp loads at once.
struct alignas(16) StepRecord {
  uint32_t units;        // of elements that a lane takes at once, the last one counted if there is a rest
  uint32_t whole_units;  // that allow wide accesses to all arrays
  float factor;          // of gradients
  GradAfter after;
  bool skips;
  uint16_t unused;
  char* param;
  char* param_extra;
  struct State {
    char* data;
    char* extra;
  } state[kMaxStatesOfKernels];
  char* grad;
  int64_t numel;
  alignas(16) unsigned char rule[48];  // the rule for float
};
static_assert(sizeof(StepRecord) == 128 && offsetof(StepRecord, rule) == 80);

template <class Rule>
DT_HOST_DEVICE StepRecord record_of(const ParamJob& param, const Rule& rule, const GradScaling& grad_scaling) {
  static_assert(sizeof(Rule) <= sizeof(StepRecord::rule) && std::is_trivially_copyable_v<Rule>);
  StepRecord record = {};
  record.factor = static_cast<float>(grad_scaling.factor);
  record.after = grad_scaling.after;
  record.skips = grad_scaling.skips;
  record.param = static_cast<char*>(param.param.data);
  record.param_extra = static_cast<char*>(param.param.extra);
  record.grad = static_cast<char*>(param.grad.data);
  const bool has_codes = Rule::kNumStates > 0 && has_blocks(param.state[0].format);
  const int64_t grad_bytes = bytes_of(param.grad.format);
  const int unit =
      step_unit(has_codes, grad_bytes, Rule::kNumStates > 0 ? bytes_of(param.state[0].format) : grad_bytes);
  const auto is_aligned = [unit](const void* data, int64_t bytes) {
    const int64_t access = unit * bytes < 16 ? unit * bytes : 16;
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(access) == 0;
  };
  const int extra_bytes = step_extra_bytes(param.param.format);
  bool all_aligned = is_aligned(param.param.data, bytes_of(param.param.format)) &&
                     is_aligned(param.grad.data, grad_bytes) &&
                     (extra_bytes == 0 || is_aligned(param.param.extra, extra_bytes));
  for (int s = 0; s < kMaxStatesOfKernels && s < Rule::kNumStates; ++s) {
    record.state[s] = {static_cast<char*>(param.state[s].data), static_cast<char*>(param.state[s].extra)};
    all_aligned = all_aligned && is_aligned(param.state[s].data, bytes_of(param.state[s].format));
  }
  record.numel = param.numel;
  record.units = static_cast<uint32_t>((param.numel + unit - 1) / unit);
  record.whole_units = all_aligned ? static_cast<uint32_t>(param.numel / unit) : 0;
  memcpy(record.rule, &rule, sizeof(rule));
  return record;
}

// One block's work: kBlockElements elements of a larger parameter, or several small parameters.
struct alignas(8) StepBlock {
  int32_t param;  // the first one
  int32_t part;   // the number of kBlockElements before; negative: of small parameters, times -1
};

struct StepLaunch {
  int32_t kernel;  // row in DT_STEP_KERNELS
  int64_t first_block, num_blocks;
};

struct StepPlan {
  std::vector<StepBlock> blocks;
  std::vector<StepLaunch> launches;  // empty if all parameters choose formats at run time
  std::vector<int32_t> others;       // the parameters that do, if there are launches

  // The sizes and formats that it was made for.
  struct Planned {
    int64_t numel;
    Format param, grad, state[kMaxStatesOfKernels];
    bool operator==(const Planned&) const = default;
  };
  std::vector<Planned> planned;
};

// Returns whether a plan holds for these parameters as well, whose rule and computing type are the same.
bool is_plan_of(const StepPlan& plan, const ParamJob* params, size_t num_params);

// Plans a step.
StepPlan plan_step(RuleKind kind, bool in_double, const ParamJob* params, int32_t num_params);

}  // namespace drivetrain::optim
