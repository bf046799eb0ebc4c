// Runs one wrong kernel, or its right twin, on cuda_on_cpu/, which must reject the wrong one;
// tests/package/test_native.py runs all of them.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "base/launch_cuda.h"

namespace {

constexpr int kThreads = 64;
constexpr unsigned kAll = 0xffffffffu;

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), int64_t blocks, int threads, const Args&... args) {
  drivetrain::launch_cuda("a kernel", kernel, blocks, threads, nullptr, args...);
}

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong result: %s\n", what);
  std::exit(1);
}

// ---- Two blocks write one address. A barrier orders the threads of a block, and no blocks.
__global__ void __launch_bounds__(kThreads) write_together(int* to, bool apart) {
  __syncthreads();
  if (threadIdx.x == 0) to[apart ? blockIdx.x : 0] = 1;
  __syncthreads();
}
void run_blocks_write_one_address(bool is_right) {
  std::vector<int> to(4);
  launch(write_together, 4, kThreads, to.data(), is_right);
}

// ---- The threads of a warp communicate through memory, but an exchange orders none.
__global__ void __launch_bounds__(kThreads) rotate(int* values, int* to, bool with_barrier) {
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (with_barrier) {
    __syncwarp();
  } else {
    __ballot_sync(kAll, 1);
  }
  to[threadIdx.x] = values[threadIdx.x ^ 1];
}
void run_exchange_orders_memory(bool is_right) {
  std::vector<int> values(kThreads), to(kThreads);
  launch(rotate, 1, kThreads, values.data(), to.data(), is_right);
}

// ---- Two halves of a warp sum with a full mask, each at its own place.
__global__ void __launch_bounds__(kThreads) reduce_apart(unsigned* to, bool together) {
  const unsigned lane = threadIdx.x % 32;
  unsigned largest = lane;
  if (together) {
    largest = __reduce_max_sync(kAll, lane < 16 ? lane : 0);
  } else if (lane < 16) {
    largest = __reduce_max_sync(kAll, lane);
  } else {
    largest = __reduce_max_sync(kAll, 0);
  }
  to[threadIdx.x] = largest;
}
void run_split_reduction(bool is_right) {
  std::vector<unsigned> to(kThreads);
  launch(reduce_apart, 1, kThreads, to.data(), is_right);
  expect(to == std::vector<unsigned>(kThreads, 15), "the largest of a warp");
}

// ---- The same, by a function that both halves call.
__device__ unsigned largest_of(unsigned value) { return __reduce_max_sync(kAll, value); }
__global__ void __launch_bounds__(kThreads) reduce_in_function(unsigned* to, bool together) {
  const unsigned lane = threadIdx.x % 32;
  if (together) {
    to[threadIdx.x] = largest_of(lane < 16 ? lane : 0);
  } else if (lane < 16) {
    to[threadIdx.x] = largest_of(lane);
  } else {
    to[threadIdx.x] = largest_of(0);
  }
}
void run_split_function(bool is_right) {
  std::vector<unsigned> to(kThreads);
  launch(reduce_in_function, 1, kThreads, to.data(), is_right);
  expect(to == std::vector<unsigned>(kThreads, 15), "the largest of a warp");
}

// ---- A full mask names lanes that have returned.
__global__ void __launch_bounds__(kThreads) return_early(double* to, bool stays) {
  if (!stays && threadIdx.x >= 50) return;
  to[threadIdx.x] = __shfl_xor_sync(kAll, static_cast<double>(threadIdx.x), 1);
}
void run_returned_lanes(bool is_right) {
  std::vector<double> to(kThreads);
  launch(return_early, 1, kThreads, to.data(), is_right);
  expect(to[0] == 1 && to[63] == 62, "the neighbor's values");
}

// ---- Two halves of a block wait at two barriers.
__global__ void __launch_bounds__(kThreads) wait_apart(bool together) {
  if (together) {
    __syncthreads();
  } else if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
void run_split_barrier(bool is_right) { launch(wait_apart, 1, kThreads, is_right); }

// ---- A sum in shared memory that no thread has set to zero.
__global__ void __launch_bounds__(kThreads) add_to_unset(float* to, bool sets) {
  __shared__ float sums[2];
  const unsigned warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
    if (sets) sums[warp] = 0;
    sums[warp] += 1;
  }
  __syncthreads();
  if (threadIdx.x == 0) *to = sums[0] + sums[1];
}
// In a template the variable lies in another section.
template <class T>
__global__ void __launch_bounds__(kThreads) max_with_unset(T* to, bool sets) {
  __shared__ T largest;
  if (threadIdx.x == 0) {
    if (sets) largest = 0;
    largest = max(largest, T(3));
    to[blockIdx.x] = largest;
  }
}
void run_shared_memory_is_unset(bool is_right) {
  float to = 0;
  launch(add_to_unset, 1, kThreads, &to, is_right);
  expect(to == 2, "a sum in shared memory");
}
void run_shared_memory_of_template(bool is_right) {
  std::vector<int> to(3);
  launch(max_with_unset<int>, 3, kThreads, to.data(), is_right);
  expect(to == std::vector<int>(3, 3), "a maximum in shared memory");
}
// ---- A block reads what the block before it left in shared memory.
__global__ void __launch_bounds__(kThreads) leave_for_next(int* to, bool sets) {
  __shared__ int left;
  if (threadIdx.x != 0) return;
  if (sets || blockIdx.x == 0) left = 5;
  to[blockIdx.x] = left;
}
void run_shared_memory_of_last_block(bool is_right) {
  std::vector<int> to(4);
  launch(leave_for_next, 4, kThreads, to.data(), is_right);
  expect(to == std::vector<int>(4, 5), "what was left in shared memory");
}

// ---- A result that depends on the order of blocks, or of threads.
__global__ void __launch_bounds__(kThreads) take_last(unsigned* block, unsigned* thread) {
  if (thread == nullptr) {
    if (threadIdx.x == 0) *block = blockIdx.x;
  } else if (blockIdx.x == 0) {
    *thread = threadIdx.x;
  }
}
void expect_drawn(bool is_right, bool of_threads) {
  unsigned last[8] = {};
  for (unsigned seed = 0; seed < 8; ++seed) {
    cuda_on_cpu::set_seed(is_right ? 1 : seed);
    launch(take_last, 8, kThreads, &last[seed], of_threads ? &last[seed] : nullptr);
  }
  for (unsigned value : last) expect(value == last[0], "it differs between seeds");
}
void run_last_block(bool is_right) { expect_drawn(is_right, false); }
void run_last_thread(bool is_right) { expect_drawn(is_right, true); }

// ---- Launches beyond the limits.
struct Bytes {
  unsigned char bytes[4096];
};
__global__ void __launch_bounds__(kThreads) take_bytes(Bytes) {}
__global__ void __launch_bounds__(kThreads) take_bytes_and_more(Bytes, char) {}
void run_parameters(bool is_right) {
  if (is_right) return launch(take_bytes, 1, kThreads, Bytes{});
  launch(take_bytes_and_more, 1, kThreads, Bytes{}, 'x');
}

__global__ void __launch_bounds__(256, 4) bounded() {}
void run_launch_bounds(bool is_right) { launch(bounded, 1, is_right ? 256 : 288); }

template <int kRegisters>
__global__ void __maxnreg__(kRegisters) limited() {}
void run_registers(bool is_right) { launch(limited<72>, 1, is_right ? 896 : 928); }

__global__ void unlimited() {}
void run_registers_without_bounds(bool is_right) { launch(unlimited, 1, is_right ? 256 : 288); }

void run_grid(bool is_right) {
  if (is_right) return launch(bounded, 1000, 32);
  launch(bounded, int64_t{1} << 31, 32);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)(bool is_right)> kernels = {
#define DT_ROW(name) {#name, run_##name}
      DT_ROW(blocks_write_one_address),
      DT_ROW(exchange_orders_memory),
      DT_ROW(split_reduction),
      DT_ROW(split_function),
      DT_ROW(returned_lanes),
      DT_ROW(split_barrier),
      DT_ROW(shared_memory_is_unset),
      DT_ROW(shared_memory_of_template),
      DT_ROW(shared_memory_of_last_block),
      DT_ROW(last_block),
      DT_ROW(last_thread),
      DT_ROW(parameters),
      DT_ROW(launch_bounds),
      DT_ROW(registers),
      DT_ROW(registers_without_bounds),
      DT_ROW(grid)};
#undef DT_ROW
  const auto found = kernels.find(argc > 1 ? argv[1] : "");
  if (found == kernels.end()) return std::fprintf(stderr, "no kernel of that name\n"), 2;
  try {
    found->second(/*is_right=*/argc > 2);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("accepted\n");
}
