// The stand-in's own interface, beside CUDA's: how ATen's operators, our kernels and NCCL's stand-in put work on a
// fake stream. All functions are C symbols of the preloaded library; nothing here needs torch.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* fake_cuda_stream;  // cudaStream_t

// Device memory that work reads or writes: addresses as the host knows them, not translated.
typedef struct {
  const void* address;
  size_t bytes;
  int writes;  // 0: reads, 1: writes (a range that is both is listed twice)
} fake_cuda_range;

enum { FAKE_CUDA_DONE = 0, FAKE_CUDA_AGAIN = 1, FAKE_CUDA_FAILED = 2 };

// Runs on the executor's thread when the stream's turn has come. Must not wait for another process or stream: it
// returns FAKE_CUDA_AGAIN, and is called again soon, after other streams had their turn.
typedef int (*fake_cuda_work)(void* context);

// Puts work on a stream. The name shows in reports. `release` (may be null) is called once the context is no longer
// needed: after the work ran, or, for captured work, when its graph is destroyed. Returns a cudaError_t. Ranges are
// checked for races when the work runs (before its first call).
int fake_cuda_enqueue(fake_cuda_stream stream, const char* name, fake_cuda_work work, void* context,
                      void (*release)(void*), const fake_cuda_range* ranges, size_t num_ranges);

// Where the executor reads and writes the device memory at this address; the address itself if it is no device memory.
// The host sees device memory protected at its own address, so only work on a stream may use this view.
void* fake_cuda_view(const void* address);

// Opens device memory at its own addresses while `open` is above zero: for work whose pointers lie in device memory.
void fake_cuda_open(void);
void fake_cuda_close(void);

// The bytes [*begin, *end) of all devices' address ranges, for quick tests of an address.
void fake_cuda_arena(uintptr_t* begin, uintptr_t* end);

// Checks a range for races on behalf of the work that now runs on the executor.
void fake_cuda_check(const void* address, size_t bytes, int writes);

// Waits until what is enqueued on the stream so far has run, without counting as a wait of the host's.
int fake_cuda_drain(fake_cuda_stream stream);

// Whether the calling thread is the executor.
int fake_cuda_is_executor(void);

// Records an error of the program under test: printed, and counted in fake_cuda_num_errors.
void fake_cuda_report(const char* kind, const char* text);

// Host waits so far: cudaStreamSynchronize, cudaEventSynchronize, cudaDeviceSynchronize and synchronous copies.
uint64_t fake_cuda_num_host_waits(void);

// Errors so far (races, host accesses, failed work), and their texts joined by newlines, oldest first.
uint64_t fake_cuda_num_errors(void);
// Copies at most `bytes` of the text of error number `index` (from 0) into `text`; returns its full size.
size_t fake_cuda_error_text(uint64_t index, char* text, size_t bytes);

// Draws the seed of delays and orders anew; the environment variable FAKE_CUDA_SEED sets the first.
void fake_cuda_seed(uint64_t seed);
// Sets the longest delay of a stream's work in microseconds (FAKE_CUDA_DELAY_US).
void fake_cuda_set_delay(uint64_t microseconds);

#ifdef __cplusplus
}
#endif
