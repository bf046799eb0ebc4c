// Declares the stand-in's own interface, in addition to CUDA's. ATen's operators, the package's kernels and the NCCL
// stand-in use it to put work on a fake stream. All functions are C symbols of the preloaded library and need no torch.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* fake_cuda_stream;  // cudaStream_t

// Describes device memory that work reads or writes. `address` is the host's address, not that of `fake_cuda_view`.
typedef struct {
  const void* address;
  size_t bytes;
  int writes;  // 0: reads, 1: writes; a range that is both is listed twice
} fake_cuda_range;

enum { FAKE_CUDA_DONE = 0, FAKE_CUDA_AGAIN = 1, FAKE_CUDA_FAILED = 2 };

// Runs on the executor's thread when the stream reaches it. The function must not wait for another process or stream.
// It returns FAKE_CUDA_AGAIN instead, and the executor calls it again later, so that other streams can run in between.
typedef int (*fake_cuda_work)(void* context);

// Puts work on a stream and returns a cudaError_t. Reports show the name. `release` may be null; it is called once the
// context is no longer needed. For captured work, that is when nothing refers to its graph any more. The ranges are
// checked for races before the work's first call in each run.
int fake_cuda_enqueue(fake_cuda_stream stream, const char* name, fake_cuda_work work, void* context,
                      void (*release)(void*), const fake_cuda_range* ranges, size_t num_ranges);

// Returns the address at which work on a stream accesses this device memory. Returns `address` itself if it is not
// device memory. Only work may use this view: the host's mapping is protected so that accesses of the host are found.
void* fake_cuda_view(const void* address);

// Lift and restore the protection of the host's mapping, for work that uses the host's addresses of device memory.
// Calls may nest.
void fake_cuda_open(void);
void fake_cuda_close(void);

// Returns the addresses [*begin, *end) that cover the memory of all devices, for quick tests of an address.
void fake_cuda_arena(uintptr_t* begin, uintptr_t* end);

// Checks a range for races on behalf of the work that the executor currently runs.
void fake_cuda_check(const void* address, size_t bytes, int writes);

// Waits until all work enqueued on the stream so far has run. The call does not count as a host wait.
int fake_cuda_drain(fake_cuda_stream stream);

// Returns 1 if the calling thread is the executor, otherwise 0.
int fake_cuda_is_executor(void);

// Prints an error of the program under test and counts it in fake_cuda_num_errors. Ends the process unless
// FAKE_CUDA_ON_ERROR=record.
void fake_cuda_report(const char* kind, const char* text);

// Returns the number of host waits so far: cudaStreamSynchronize, cudaEventSynchronize, cudaDeviceSynchronize, and
// copies that wait for their stream.
uint64_t fake_cuda_num_host_waits(void);

// Returns the number of errors so far, such as races, host accesses and failed work.
uint64_t fake_cuda_num_errors(void);
// Copies the text of error number `index` (from 0) into `text`, at most `bytes` bytes with the terminating null.
// Returns the full size, or 0 if there is no such error.
size_t fake_cuda_error_text(uint64_t index, char* text, size_t bytes);

// Lists the work that runs from now on in a file, until the next call; `path` may be null. A line has the work's name
// and the bytes of device memory that it reads and writes, separated by tabs. A byte that a kernel reads twice counts
// once.
void fake_cuda_record(const char* path);

// Copies the text that says which call of which thread made the primary context of a device: the call and the thread's
// stacks. Returns the full size as above, or 0 if the device has no context.
size_t fake_cuda_context_of(int device, char* text, size_t bytes);

// Returns the bytes of host memory that are page-locked, in whole pages.
uint64_t fake_cuda_pinned_bytes(void);
// Returns the most bytes that were page-locked since the last call.
uint64_t fake_cuda_peak_pinned_bytes(void);

// Seeds the random delays and orders. The environment variable FAKE_CUDA_SEED sets the first seed.
void fake_cuda_seed(uint64_t seed);
// Sets the longest delay of a stream's work, in microseconds (initially FAKE_CUDA_DELAY_US).
void fake_cuda_set_delay(uint64_t microseconds);

#ifdef __cplusplus
}
#endif
