// Declares the recorder of the device bytes that a kernel reads and writes while it runs.
#pragma once

namespace fake_cuda_kernels {

// Discards all recorded accesses and starts to record.
void begin_accesses();
// Stops recording and passes every contiguous run of bytes to fake_cuda_check.
void check_accesses();

}  // namespace fake_cuda_kernels
