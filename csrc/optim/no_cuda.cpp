// The CUDA step's absence: what a build without nvcc answers.
#include "base/check.h"
#include "optim/step.h"

namespace drivetrain::optim {

bool has_cuda() { return false; }

void step_cuda(const StepJob&, void*) {
  throw UnsupportedError(
      "these parameters are on a CUDA device, but drivetrain was built without nvcc: put nvcc on PATH and reinstall "
      "with \"pip install --no-build-isolation --force-reinstall --no-deps .\", or keep torch's optimizer there.");
}

}  // namespace drivetrain::optim
