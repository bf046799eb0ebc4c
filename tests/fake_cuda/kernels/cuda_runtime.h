// Replaces CUDA's header of that name. Kernels run as in tests/native/cuda_on_cpu, except that a launch copies its
// arguments and enqueues the run on a fake stream.
#pragma once

// Rename the emulator's own versions of these functions: this header and the preloaded runtime provide others.
#define cudaLaunchKernelEx cuda_on_cpu_run_at_once
#define cudaGetErrorName cuda_on_cpu_error_name
#define cudaGetErrorString cuda_on_cpu_error_string
#define cudaStreamIsCapturing cuda_on_cpu_is_capturing
#define cudaThreadExchangeStreamCaptureMode cuda_on_cpu_exchange_capture_mode
#define cudaStreamGetCaptureInfo cuda_on_cpu_get_capture_info
#define cudaUserObjectCreate cuda_on_cpu_create_user_object
#define cudaUserObjectRelease cuda_on_cpu_release_user_object
#define cudaGraphRetainUserObject cuda_on_cpu_retain_user_object
#include "../../native/cuda_on_cpu/cuda_runtime.h"
#undef cudaLaunchKernelEx
#undef cudaGetErrorName
#undef cudaGetErrorString
#undef cudaStreamIsCapturing
#undef cudaThreadExchangeStreamCaptureMode
#undef cudaStreamGetCaptureInfo
#undef cudaUserObjectCreate
#undef cudaUserObjectRelease
#undef cudaGraphRetainUserObject

#include <tuple>
#include <type_traits>

extern "C" {
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* num_nodes);
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* pointer, void (*destroy)(void*), unsigned references,
                                 unsigned flags);
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned references);
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned references, unsigned flags);
}

namespace fake_cuda_kernels {

cudaError_t enqueue(const cudaLaunchConfig_t& config, const cuda_on_cpu::Kernel& kernel, std::function<void()> thread);

}  // namespace fake_cuda_kernels

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  return fake_cuda_kernels::enqueue(
      *config, cuda_on_cpu::kernel_of(kernel),
      [kernel, held = std::tuple<std::decay_t<Params>...>(args...)] { std::apply(kernel, held); });
}
