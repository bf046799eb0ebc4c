// Writes the host's bytes to a device through the arguments of kernels; see write_cuda.h. Includes no torch header.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/launch_cuda.h"
#include "base/write_cuda.h"

namespace drivetrain {
namespace {

constexpr int kWriteThreads = 128;

// Returns the calling thread's mode before.
int exchange_capture_mode(int to) noexcept {
  auto mode = static_cast<cudaStreamCaptureMode>(to);
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));  // fails for invalid modes only
  return mode;
}

// The bytes of one launch: kernel arguments have at least 4 KiB everywhere.
struct LaunchBytes {
  unsigned char bytes[4000];
};

__global__ void __launch_bounds__(kWriteThreads) write_bytes(LaunchBytes values, unsigned char* to, int32_t bytes) {
  for (int32_t i = threadIdx.x; i < bytes; i += kWriteThreads) to[i] = values.bytes[i];
}

}  // namespace

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

OutsideCaptures::OutsideCaptures() noexcept : mode_before_(exchange_capture_mode(cudaStreamCaptureModeRelaxed)) {}
OutsideCaptures::~OutsideCaptures() { exchange_capture_mode(mode_before_); }
void leave_captures() noexcept { exchange_capture_mode(cudaStreamCaptureModeRelaxed); }

void keep_for_graph(void* stream, KeptForGraph object) {
  const auto captured = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  check_cuda(cudaStreamGetCaptureInfo(captured, &status, nullptr, &graph, nullptr, nullptr, nullptr),
             "cudaStreamGetCaptureInfo");
#else
  check_cuda(cudaStreamGetCaptureInfo_v2(captured, &status, nullptr, &graph, nullptr, nullptr),
             "cudaStreamGetCaptureInfo");
#endif
  cudaUserObject_t kept = nullptr;
  check_cuda(cudaUserObjectCreate(&kept, object.get(), object.get_deleter(), 1, cudaUserObjectNoDestructorSync),
             "cudaUserObjectCreate");
  object.release();  // CUDA has it
  if (const cudaError_t error = cudaGraphRetainUserObject(graph, kept, 1, cudaGraphUserObjectMove)) {
    static_cast<void>(cudaUserObjectRelease(kept, 1));
    check_cuda(error, "cudaGraphRetainUserObject");
  }
}

void write_cuda(void* to, const void* from, size_t bytes, void* stream) {
  for (size_t begin = 0; begin < bytes; begin += sizeof(LaunchBytes)) {
    LaunchBytes values = {};
    const size_t size = std::min(bytes - begin, sizeof(LaunchBytes));
    std::memcpy(values.bytes, static_cast<const unsigned char*>(from) + begin, size);
    launch_cuda("writing the optimizer's table", write_bytes, 1, kWriteThreads, stream, values,
                static_cast<unsigned char*>(to) + begin, static_cast<int32_t>(size));
  }
}

}  // namespace drivetrain
