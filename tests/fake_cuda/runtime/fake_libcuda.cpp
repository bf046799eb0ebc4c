// Replaces the driver library, which torch loads by name and calls for a few functions only.
#include <cuda.h>
#undef cuDevicePrimaryCtxGetState

#include "../fake_cuda.h"

#define FAKE_CUDA_API extern "C" __attribute__((visibility("default")))

FAKE_CUDA_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
FAKE_CUDA_API CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
FAKE_CUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = fake_cuda_context_of(device, nullptr, 0) != 0;
  return CUDA_SUCCESS;
}
FAKE_CUDA_API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}
FAKE_CUDA_API CUresult cuGetErrorName(CUresult, const char** name) {
  *name = "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}
FAKE_CUDA_API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
