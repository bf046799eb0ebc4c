// The CUDA step's absence: what a build without nvcc answers.
#include "base/check.h"
#include "base/cuda_versions.h"
#include "grad/add_micro_grad.h"
#include "grad/norm.h"
#include "optim/convert.h"
#include "optim/cuda_step.h"

namespace drivetrain {
namespace {

[[noreturn]] void say_there_is_none() {
  throw UnsupportedError(
      "these parameters are on a CUDA device, but drivetrain was built without nvcc: put nvcc on PATH and reinstall "
      "with \"pip install --no-build-isolation --force-reinstall --no-deps .\", or keep torch's optimizer there.");
}

}  // namespace

CudaVersions cuda_versions() { return {}; }

namespace optim {

bool has_cuda() { return false; }
bool is_capturing(void*) { say_there_is_none(); }
void write_cuda(void*, const void*, size_t, void*) { say_there_is_none(); }
void treat_cuda(const TreatmentAsked&, const TreatmentScalars&, const double*, int64_t, GradTreatment*, void*) {
  say_there_is_none();
}
void start_cuda(const StepStart&, void*) { say_there_is_none(); }
void factor_cuda(const StepJob&, const Factored*, int32_t, int64_t, int64_t, void*, const Between*) {
  say_there_is_none();
}
void adapt_cuda(const StepJob&, int64_t, LayerSums*, RuleArgs*, void*, const Between*) { say_there_is_none(); }
void step_cuda(const StepJob&, void*) { say_there_is_none(); }
void step_kernel_cuda(const StepLaunch&, const StepRecord*, const StepItem*, const StepJob&, void*) {
  say_there_is_none();
}
void convert_cuda(const Conversion*, int32_t, int64_t, void*) { say_there_is_none(); }

}  // namespace optim

namespace grad {

void accumulate_cuda(const Addition&, int64_t, void*) { say_there_is_none(); }
void chunk_sums_cuda(const optim::ParamJob*, int32_t, int64_t, double*, void*) { say_there_is_none(); }

}  // namespace grad
}  // namespace drivetrain
