// The device memory that a kernel touches while it runs: which bytes it reads, which it writes.
#pragma once

namespace fake_cuda_kernels {

// Forgets what was seen, and notes accesses from now on.
void begin_accesses();
// Notes no more, and reports every run of bytes to fake_cuda_check.
void check_accesses();

}  // namespace fake_cuda_kernels
