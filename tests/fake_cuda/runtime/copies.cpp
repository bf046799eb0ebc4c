// Implements copies and fills. A pageable source is staged at the call, and the call waits for a pageable target.
// Pinned memory is read and written when the stream reaches the copy.
#include <cstring>

#include "core.h"

namespace fake_cuda {

namespace {

bool fits(const Place& place, const void* pointer, size_t bytes) {
  // A range of the host must be page-locked as a whole, by one call, or not at all.
  if (place.kind == Kind::kPageable) return !has_pinned(pointer, bytes);
  return place.is_known && reinterpret_cast<uintptr_t>(pointer) + bytes <= place.begin + place.bytes;
}

cudaError_t copy(Lock& lock, Stream* stream, void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                 bool is_synchronous) {
  if (bytes == 0) return cudaSuccess;
  const Place target = place_of(to), source = place_of(from);
  if (!fits(target, to, bytes) || !fits(source, from, bytes)) return fail(cudaErrorInvalidValue);
  const bool to_device = target.kind == Kind::kDevice, from_device = source.kind == Kind::kDevice;
  if (kind != cudaMemcpyDefault) {
    const bool says_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool says_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    // Pinned memory has a device address too, so either direction is legal for it.
    if ((to_device && !says_to) || (target.kind == Kind::kPageable && says_to)) return fail(cudaErrorInvalidValue);
    if ((from_device && !says_from) || (source.kind == Kind::kPageable && says_from)) {
      return fail(cudaErrorInvalidValue);
    }
  }
  auto work = std::make_shared<Work>();
  work->name = std::string(is_synchronous ? "cudaMemcpy" : "cudaMemcpyAsync") + " of " + std::to_string(bytes) +
               " bytes from " +
               (from_device                    ? "device"
                : source.kind == Kind::kPinned ? "pinned"
                                               : "pageable") +
               " to " +
               (to_device                      ? "device"
                : target.kind == Kind::kPinned ? "pinned"
                                               : "pageable") +
               " memory";
  work->ranges = {{reinterpret_cast<uintptr_t>(from), bytes, false}, {reinterpret_cast<uintptr_t>(to), bytes, true}};
  const bool is_captured = stream->capture != nullptr;
  const void* read_at = view(from);
  void* write_at = view(to);
  if (source.kind == Kind::kPageable && !is_captured) {
    const auto* begin = static_cast<const char*>(from);
    work->run = [write_at, staged = std::vector<char>(begin, begin + bytes)] {
      std::memcpy(write_at, staged.data(), staged.size());
      return FAKE_CUDA_DONE;
    };
  } else {
    work->run = [write_at, read_at, bytes] {
      std::memmove(write_at, read_at, bytes);
      return FAKE_CUDA_DONE;
    };
  }
  if (const cudaError_t error = enqueue(stream, std::move(work))) return error;
  if (is_captured) return cudaSuccess;
  // A synchronous copy from device to device does not wait. An asynchronous copy waits if its target is pageable, or
  // if no device takes part.
  const bool waits =
      is_synchronous ? !(to_device && from_device) : target.kind == Kind::kPageable || (!to_device && !from_device);
  if (!waits) return cudaSuccess;
  ++state().num_host_waits;
  return wait_for(lock, {stream->last}, is_synchronous ? "cudaMemcpy" : "cudaMemcpyAsync");
}

cudaError_t fill(Stream* stream, void* at, int value, size_t bytes) {
  if (bytes == 0) return cudaSuccess;
  const Place place = place_of(at);
  if (place.kind == Kind::kPageable || !fits(place, at, bytes)) return fail(cudaErrorInvalidValue);
  auto work = std::make_shared<Work>();
  work->name = "cudaMemsetAsync of " + std::to_string(bytes) + " bytes";
  work->ranges = {{reinterpret_cast<uintptr_t>(at), bytes, true}};
  work->run = [write_at = view(at), value, bytes] {
    std::memset(write_at, value, bytes);
    return FAKE_CUDA_DONE;
  };
  return enqueue(stream, std::move(work));
}

}  // namespace

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                          cudaStream_t handle) {
  use_context(__func__);
  note_location();
  Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  return copy(lock, stream, to, from, bytes, kind, false);
}

FAKE_CUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t handle) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, handle);
}

FAKE_CUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  use_context(__func__);
  Lock lock(state().mutex);
  if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  return copy(lock, find_stream(nullptr), to, from, bytes, kind, true);
}

FAKE_CUDA_API cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  use_context(__func__);
  const Lock lock(state().mutex);
  if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  return fill(find_stream(nullptr), at, value, bytes);
}

FAKE_CUDA_API cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t handle) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  return fill(stream, at, value, bytes);
}
