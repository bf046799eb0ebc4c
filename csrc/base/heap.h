// Declares controls of how much freed memory the C library's heap keeps.
#pragma once

#include <cstdint>

namespace drivetrain {

// Lets glibc keep the memory of tensors of up to `bytes` (at most 8 MiB) that are allocated and freed repeatedly.
// Otherwise each tensor's memory would return to the system, and the next tensor would fault it in page by page. This
// affects the whole process, which may keep up to eight times `bytes`. It has no effect if the user has set malloc's
// thresholds or another library provides malloc.
void keep_freed_memory(int64_t bytes);

// Returns every free whole page to the system at once, also from the middle of the heap. Long-lived tensors between
// freed ones leave holes that are too small for later tensors and would keep their memory.
void return_freed_memory();

}  // namespace drivetrain
