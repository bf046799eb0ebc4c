// Replaces packing on CUDA in builds without nvcc: every function raises.
#include "base/check.h"
#include "saved_tensors/pack_cuda.h"

namespace drivetrain::saved_tensors {
namespace {

[[noreturn]] void throw_without_cuda() {
  throw UnsupportedError(
      "tensor is on a CUDA device, but drivetrain was built without nvcc. Put nvcc on PATH and reinstall with \"pip "
      "install --no-build-isolation --force-reinstall --no-deps .\", or do not pack tensors on CUDA.");
}

}  // namespace

void pack_bools_cuda(const uint8_t*, int64_t, uint8_t*, void*) { throw_without_cuda(); }
void unpack_bools_cuda(const uint8_t*, int64_t, uint8_t*, void*) { throw_without_cuda(); }
void convert_cuda(const formats::TypedArray&, const formats::TypedArray&, int64_t, void*) { throw_without_cuda(); }

}  // namespace drivetrain::saved_tensors
