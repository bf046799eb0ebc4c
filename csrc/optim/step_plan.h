// Plans a CUDA step: which parameters have a kernel specialized to their storage formats, and which blocks take them.
// Needs no torch header.
#pragma once

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

// The data of one parameter for a specialized kernel: one line of the cache.
struct alignas(16) StepRecord {
  char* param;
  char* param_extra;
  char* grad;
  int64_t numel;
  struct State {
    char* data;
    char* extra;
  } state[kMaxStatesOfKernels];
  alignas(16) unsigned char rule[64];  // the rule for float
};
static_assert(sizeof(StepRecord) == 128);

template <class Rule>
DT_HOST_DEVICE StepRecord record_of(const ParamJob& param, const Rule& rule) {
  static_assert(sizeof(Rule) <= sizeof(StepRecord::rule) && std::is_trivially_copyable_v<Rule>);
  StepRecord record = {};
  record.param = static_cast<char*>(param.param.data);
  record.param_extra = static_cast<char*>(param.param.extra);
  record.grad = static_cast<char*>(param.grad.data);
  record.numel = param.numel;
  for (int s = 0; s < kMaxStatesOfKernels && s < Rule::kNumStates; ++s) {
    record.state[s] = {static_cast<char*>(param.state[s].data), static_cast<char*>(param.state[s].extra)};
  }
  memcpy(record.rule, &rule, sizeof(rule));
  return record;
}

// The blocks from first_block up to the next item's: kBlockElements elements each of a larger parameter, or one block
// for num_params > 0 small parameters.
struct alignas(16) StepItem {
  int32_t first_block;
  int32_t first_param;
  int32_t num_params;
  int32_t unused;
};

struct StepLaunch {
  int32_t kernel;  // row in DT_STEP_KERNELS
  int32_t first_item, num_items;
  int64_t num_blocks;
};

struct StepPlan {
  std::vector<StepItem> items;
  std::vector<StepLaunch> launches;  // empty if all parameters choose formats at run time
  std::vector<int32_t> others;       // the parameters that do, if there are launches
};

// Plans a step.
StepPlan plan_step(RuleKind kind, bool in_double, const ParamJob* params, int32_t num_params);

}  // namespace drivetrain::optim
