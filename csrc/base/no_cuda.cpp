// Answers for CUDA in a build without nvcc; see write_cuda.h, page_lock.h and cuda_versions.h.
#include "base/no_cuda.h"

#include "base/check.h"
#include "base/cuda_versions.h"
#include "base/page_lock.h"
#include "base/write_cuda.h"

namespace drivetrain {

void refuse_cuda() {
  throw UnsupportedError(
      "these parameters are on a CUDA device, but drivetrain was built without nvcc. Put nvcc on PATH and reinstall "
      "with \"pip install --no-build-isolation --force-reinstall --no-deps .\", or keep torch's optimizer there.");
}

CudaVersions cuda_versions() { return {}; }
bool is_capturing(void*) { refuse_cuda(); }
OutsideCaptures::OutsideCaptures() noexcept : mode_before_(0) {}
OutsideCaptures::~OutsideCaptures() = default;
void leave_captures() noexcept {}
bool can_lock_pages() noexcept { return false; }
bool lock_pages(void*, size_t) noexcept { return false; }
void unlock_pages(void*) noexcept {}
void keep_for_graph(void*, KeptForGraph) { refuse_cuda(); }
void write_cuda(void*, const void*, size_t, void*) { refuse_cuda(); }

}  // namespace drivetrain
