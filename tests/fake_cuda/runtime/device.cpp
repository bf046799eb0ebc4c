// Implements device queries, versions and errors. Refuses kernels compiled for a GPU, except torch's sleep kernel.
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstring>

#include "core.h"

namespace fake_cuda {

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_text;

std::mutex kernels_mutex;
std::map<const void*, std::string>& kernels() {
  static auto* made = new std::map<const void*, std::string>;
  return *made;
}

std::string kernel_name(const void* function) {
  const std::lock_guard<std::mutex> lock(kernels_mutex);
  const auto found = kernels().find(function);
  if (found == kernels().end()) return "an unknown kernel";
  int status = 0;
  char* plain = abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status);
  std::string name = status == 0 ? plain : found->second;
  std::free(plain);
  return name;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t handle) {
  use_context("a kernel's launch");
  const std::string name = kernel_name(function);
  if (name.find("spin_kernel") == std::string::npos) {
    return fail(cudaErrorNoKernelImageForDevice, "tests/fake_cuda cannot run a GPU's kernel: " + name.substr(0, 600));
  }
  // This is the kernel of torch.cuda._sleep. Other streams go on while it sleeps.
  const auto length =
      std::chrono::nanoseconds(std::min<int64_t>(*static_cast<int64_t*>(arguments[0]) / 2, 200'000'000));
  const Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  auto work = std::make_shared<Work>();
  work->name = "torch.cuda._sleep";
  work->run = [length, until = std::make_shared<Time>()]() {
    if (*until == Time()) *until = std::chrono::steady_clock::now() + length;
    if (std::chrono::steady_clock::now() < *until) return FAKE_CUDA_AGAIN;
    *until = Time();
    return FAKE_CUDA_DONE;
  };
  return enqueue(stream, std::move(work));
}

// Loads ATen's operators when the process first asks for devices. torch's CUDA library, which they need, is there then.
void load_operators() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY) == nullptr) return;
    Dl_info own = {};
    dladdr(reinterpret_cast<void*>(&load_operators), &own);
    std::string path = own.dli_fname;
    path = path.substr(0, path.rfind('/') + 1) + "libfake_aten.so";
    if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      std::fprintf(stderr, "fake_cuda: %s\n", dlerror());
      std::abort();
    }
  });
}

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
thread_local std::vector<Launch> configurations;

}  // namespace

cudaError_t fail(cudaError_t error) {
  last_error = error;
  last_text.clear();
  return error;
}

cudaError_t fail(cudaError_t error, std::string text) {
  last_error = error;
  last_text = std::move(text);
  return error;
}

int num_devices() {
  static const int number = static_cast<int>(number_from_environment("FAKE_CUDA_DEVICES", 2));
  return number;
}

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_API cudaError_t cudaGetDeviceCount(int* count) {
  load_operators();
  *count = num_devices();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
FAKE_CUDA_API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaSetDevice(int device) {
  load_operators();
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  make_context(device, __func__);  // since CUDA 12
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
FAKE_CUDA_API cudaError_t cudaPeekAtLastError() { return last_error; }

namespace {

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
#define FAKE_CUDA_ERROR(NAME, TEXT) {NAME, #NAME, TEXT}
constexpr ErrorText kErrors[] = {
    FAKE_CUDA_ERROR(cudaSuccess, "no error"),
    FAKE_CUDA_ERROR(cudaErrorInvalidValue, "invalid argument"),
    FAKE_CUDA_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    FAKE_CUDA_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    FAKE_CUDA_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    FAKE_CUDA_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    FAKE_CUDA_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    FAKE_CUDA_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    FAKE_CUDA_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    FAKE_CUDA_ERROR(cudaErrorNotReady, "device not ready"),
    FAKE_CUDA_ERROR(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    FAKE_CUDA_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    FAKE_CUDA_ERROR(cudaErrorNotSupported, "operation not supported"),
    FAKE_CUDA_ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    FAKE_CUDA_ERROR(cudaErrorHostMemoryAlreadyRegistered,
                    "part or all of the requested memory range is already mapped"),
    FAKE_CUDA_ERROR(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    FAKE_CUDA_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    FAKE_CUDA_ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    FAKE_CUDA_ERROR(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    FAKE_CUDA_ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    FAKE_CUDA_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    FAKE_CUDA_ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    FAKE_CUDA_ERROR(cudaErrorStreamCaptureImplicit,
                    "operation would make the legacy stream depend on a capturing blocking stream"),
    FAKE_CUDA_ERROR(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    FAKE_CUDA_ERROR(cudaErrorStreamCaptureWrongThread,
                    "attempt to terminate a thread-local capture sequence from another thread"),
};
#undef FAKE_CUDA_ERROR

}  // namespace

FAKE_CUDA_API const char* cudaGetErrorName(cudaError_t error) {
  for (const ErrorText& known : kErrors) {
    if (known.error == error) return known.name;
  }
  return "unrecognized error code";
}

FAKE_CUDA_API const char* cudaGetErrorString(cudaError_t error) {
  if (!last_text.empty()) return last_text.c_str();
  for (const ErrorText& known : kErrors) {
    if (known.error == error) return known.text;
  }
  return "unrecognized error code";
}

FAKE_CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "fake CUDA on a CPU");
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->totalGlobalMem = device_bytes();
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 50 << 20;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->pciDeviceID = device;
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 << 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 << 10;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  use_context(__func__);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0", device);
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
FAKE_CUDA_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

FAKE_CUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                                           cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// --- Kernels that nvcc compiled register their names here, and launches refer to them.
FAKE_CUDA_API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
FAKE_CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
FAKE_CUDA_API void __cudaUnregisterFatBinary(void**) {}
FAKE_CUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
FAKE_CUDA_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*,
                                          void*, void*, int*) {
  const std::lock_guard<std::mutex> lock(kernels_mutex);
  kernels()[function] = name;
}
FAKE_CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
FAKE_CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (configurations.empty()) return fail(cudaErrorInvalidConfiguration);
  *grid = configurations.back().grid;
  *block = configurations.back().block;
  *shared_bytes = configurations.back().shared_bytes;
  *static_cast<void**>(stream) = configurations.back().stream;
  configurations.pop_back();
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                             cudaStream_t stream) {
  return launch(reinterpret_cast<const void*>(kernel), arguments, stream);
}
FAKE_CUDA_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                           cudaStream_t stream) {
  return launch(function, arguments, stream);
}
FAKE_CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                              void** arguments) {
  return launch(function, arguments, config->stream);
}
FAKE_CUDA_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
FAKE_CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  use_context(__func__);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                                 unsigned) {
  use_context(__func__);
  *blocks = 2;
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                                        size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared_bytes, 0);
}
FAKE_CUDA_API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                                      cudaStream_t stream) {
  return launch(function, arguments, stream);
}
FAKE_CUDA_API char __cudaInitModule(void**) { return 1; }

// --- Functions that torch imports and the stand-in does not support.
#define FAKE_CUDA_LACKS(NAME, ...)                                                    \
  FAKE_CUDA_API cudaError_t NAME(__VA_ARGS__) {                                       \
    return fail(cudaErrorNotSupported, #NAME " is not supported by tests/fake_cuda"); \
  }
FAKE_CUDA_LACKS(cudaDeviceEnablePeerAccess, int, unsigned)
FAKE_CUDA_LACKS(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
FAKE_CUDA_LACKS(cudaFreeAsync, void*, cudaStream_t)
FAKE_CUDA_LACKS(cudaMallocAsync, void**, size_t, cudaStream_t)
FAKE_CUDA_LACKS(cudaGetSymbolAddress, void**, const void*)
FAKE_CUDA_LACKS(cudaIpcCloseMemHandle, void*)
FAKE_CUDA_LACKS(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
FAKE_CUDA_LACKS(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
FAKE_CUDA_LACKS(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)
FAKE_CUDA_LACKS(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
FAKE_CUDA_LACKS(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
FAKE_CUDA_LACKS(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
FAKE_CUDA_LACKS(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
FAKE_CUDA_LACKS(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
FAKE_CUDA_LACKS(cudaMemcpy2DAsync, void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t)
FAKE_CUDA_LACKS(cudaMemcpyToSymbol, const void*, const void*, size_t, size_t, cudaMemcpyKind)
