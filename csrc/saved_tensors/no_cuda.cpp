// The absence of packing on CUDA: what a build without nvcc answers.
#include "base/check.h"
#include "saved_tensors/pack_cuda.h"

namespace drivetrain::saved_tensors {
namespace {

[[noreturn]] void say_there_is_none() {
  throw UnsupportedError(
      "this activation is on a CUDA device, but drivetrain was built without nvcc: put nvcc on PATH and reinstall with "
      "\"pip install --no-build-isolation --force-reinstall --no-deps .\", or do not pack there.");
}

}  // namespace

void pack_bools_cuda(const uint8_t*, int64_t, uint8_t*, void*) { say_there_is_none(); }
void unpack_bools_cuda(const uint8_t*, int64_t, uint8_t*, void*) { say_there_is_none(); }
void convert_cuda(const formats::TypedArray&, const formats::TypedArray&, int64_t, void*) { say_there_is_none(); }

}  // namespace drivetrain::saved_tensors
