// Replaces CUDA's header of that name, so that kernels compiled as C++ run on the CPU. A block's threads are fibers
// that take turns at barriers only. It supports kernels in one dimension, and the parts of the language that the
// package uses. It ends the process where CUDA leaves a result undefined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>

namespace cuda_on_cpu {

constexpr unsigned kWarp = 32, kMaxThreads = 1024, kRegisters = 65536, kMaxRegisters = 255;

// Returns the registers that the compiler may give a thread of a kernel with these launch bounds.
constexpr unsigned registers_of(unsigned threads, unsigned blocks = 1) {
  const unsigned registers = kRegisters / (threads * blocks) / 8 * 8;
  return registers < kMaxRegisters ? registers : kMaxRegisters;
}
constexpr unsigned warps_of(unsigned threads, unsigned = 1) { return threads / kWarp; }

}  // namespace cuda_on_cpu

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static  // One block runs at a time, and shared_memory.ld gathers the variables of all kernels.
// A kernel's limits must be known at its launch: as many no-operations as registers lie before its code, and as many as
// warps at its beginning. No other attribute takes numbers that depend on template arguments.
#define __launch_bounds__(...)                                                                                         \
  __attribute__((patchable_function_entry(cuda_on_cpu::registers_of(__VA_ARGS__) + cuda_on_cpu::warps_of(__VA_ARGS__), \
                                          cuda_on_cpu::registers_of(__VA_ARGS__))))
#define __maxnreg__(registers) \
  __attribute__((patchable_function_entry((registers) + cuda_on_cpu::kMaxThreads / cuda_on_cpu::kWarp, registers)))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned of_x = 1) : x(of_x) {}
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {
using Where = std::source_location;
}
// All threads of the block must make the same call.
void __syncthreads(cuda_on_cpu::Where where = cuda_on_cpu::Where::current());
// All threads of the warp must make the same call: `mask` must have all 32 bits set. Only __syncwarp orders memory.
void __syncwarp(unsigned mask = 0xffffffffu, cuda_on_cpu::Where where = cuda_on_cpu::Where::current());
unsigned __reduce_max_sync(unsigned mask, unsigned value, cuda_on_cpu::Where where = cuda_on_cpu::Where::current());
unsigned __ballot_sync(unsigned mask, int predicate, cuda_on_cpu::Where where = cuda_on_cpu::Where::current());
double __shfl_down_sync(unsigned mask, double value, unsigned delta,
                        cuda_on_cpu::Where where = cuda_on_cpu::Where::current());
double __shfl_xor_sync(unsigned mask, double value, unsigned lanes,
                       cuda_on_cpu::Where where = cuda_on_cpu::Where::current());

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

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorLaunchOutOfResources = 701
};
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

// Draws, from now on, the order of blocks, that of a block's threads between barriers, and the bytes that a block finds
// in shared memory. A result that depends on them lacks a barrier, an atomic operation or a value.
void set_seed(uint64_t seed);
constexpr int kSeeds[] = {1, 2};  // two orders, for tests

extern int num_launches;

// The largest error of the emulated hardware approximations, in units in the last place. It tests the code that
// corrects them.
extern int worst_ulps;

// The code of a kernel, and the bytes of its arguments.
struct Kernel {
  const void* code;
  size_t bytes;
};
template <class... Params>
Kernel kernel_of(void (*kernel)(Params...)) {
  size_t bytes = 0;
  ((bytes = (bytes + alignof(Params) - 1) / alignof(Params) * alignof(Params) + sizeof(Params)), ...);
  return {reinterpret_cast<const void*>(kernel), bytes};
}

// Returns the error of a launch beyond the limits of any GPU that the package supports.
cudaError_t check(const cudaLaunchConfig_t& config, const Kernel& kernel);
// Runs a launch that check() accepts.
void run(const cudaLaunchConfig_t& config, const std::function<void()>& thread);

}  // namespace cuda_on_cpu

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  const cudaError_t error = cuda_on_cpu::check(*config, cuda_on_cpu::kernel_of(kernel));
  if (error == cudaSuccess) cuda_on_cpu::run(*config, [&] { kernel(args...); });
  return error;
}
