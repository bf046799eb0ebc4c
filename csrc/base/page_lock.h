// Declares page-locking of host memory, which copies of a CUDA device need to run without the host. Needs no CUDA
// header.
#pragma once

#include <cstddef>

namespace drivetrain {

// Returns whether this build has CUDA.
bool can_lock_pages() noexcept;

// Page-locks whole pages for all devices, also while another thread captures a graph. Returns false if CUDA refuses.
// A copy must not cross the end of a range that was locked at once.
bool lock_pages(void* begin, size_t bytes) noexcept;

// Unlocks what lock_pages has locked from there on. No copy may still use it.
void unlock_pages(void* begin) noexcept;

}  // namespace drivetrain
