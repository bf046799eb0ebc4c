// Page-locks host memory through the CUDA runtime; see page_lock.h.
#include "base/page_lock.h"

#include <cuda_runtime_api.h>

#include "base/write_cuda.h"

namespace drivetrain {

bool can_lock_pages() noexcept { return true; }

bool lock_pages(void* begin, size_t bytes) noexcept {
  const OutsideCaptures outside_captures;
  if (cudaHostRegister(begin, bytes, cudaHostRegisterPortable) == cudaSuccess) return true;
  static_cast<void>(cudaGetLastError());  // the thread's next check must not find it
  return false;
}

void unlock_pages(void* begin) noexcept {
  const OutsideCaptures outside_captures;
  if (cudaHostUnregister(begin) != cudaSuccess) static_cast<void>(cudaGetLastError());
}

}  // namespace drivetrain
