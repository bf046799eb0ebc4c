// Replaces CUDA's header of that name, so that kernels compiled as C++ run on the CPU. A block's threads are fibers
// that take turns at barriers only. It supports kernels in one dimension, and the parts of the language that the
// package uses.
#pragma once

#include <cstddef>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __shared__ static  // one block runs at a time

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned of_x = 1) : x(of_x) {}
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

void __syncthreads();
// These work on a whole warp: `mask` must have all 32 bits set.
void __syncwarp(unsigned mask = 0xffffffffu);
unsigned __reduce_max_sync(unsigned mask, unsigned value);
unsigned __ballot_sync(unsigned mask, int predicate);
double __shfl_down_sync(unsigned mask, double value, unsigned delta);
double __shfl_xor_sync(unsigned mask, double value, unsigned lanes);

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }

// CUDA declares these in the global namespace.
template <class A, class B>
auto min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
auto max(A a, B b) {
  return a < b ? b : a;
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9, cudaErrorInsufficientDriver = 35 };
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);

using cudaStream_t = struct CUstream_st*;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);

// Nothing is captured here, so that only the stand-in of tests/fake_cuda implements these.
#define CUDART_VERSION 13000
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaUserObject_t = struct CUuserObject_st*;
struct cudaGraphEdgeData;
enum { cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1 };
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* num_nodes);
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* pointer, void (*destroy)(void*), unsigned references,
                                 unsigned flags);
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned references);
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned references, unsigned flags);

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace cuda_on_cpu {

// The order of blocks, and of a block's threads between barriers. A result that depends on it lacks a barrier or an
// atomic operation.
enum class Order { kForwards, kBackwards };
extern Order order;

extern int num_launches;

// The largest error of the emulated hardware approximations, in units in the last place. It tests the code that
// corrects them.
extern int worst_ulps;

cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread);

}  // namespace cuda_on_cpu

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  return cuda_on_cpu::run(*config, [&] { kernel(args...); });
}
