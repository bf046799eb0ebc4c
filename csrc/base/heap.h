// The C library's heap, as far as its speed depends on how it is used.
#pragma once

#include <cstdint>

namespace drivetrain {

// Where tensors of up to `bytes` (of 8 MiB, at most) are allocated and freed in turn, again and again: lets glibc keep
// their memory instead of giving it back to the system each time, whence the next would get it page by page. For the
// whole process; up to eight such tensors' bytes then stay its own. Changes nothing where the user has set malloc's
// thresholds, or another library provides malloc.
void keep_freed_memory(int64_t bytes);

// The opposite, at once: gives the system every whole page that is free, also in the heap's middle. Where tensors that
// stay were allocated between others that went, the holes of these are too small for the next and would keep their
// memory.
void return_freed_memory();

}  // namespace drivetrain
