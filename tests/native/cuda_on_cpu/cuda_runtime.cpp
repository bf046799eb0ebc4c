// Runs a block's threads as fibers: each runs to its next barrier, in the chosen order; see cuda_runtime.h.
#include "cuda_runtime.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

// Fibers run one at a time, but the thread sanitizer sees them as threads that only barriers order, as on a GPU. So it
// finds a kernel's races. It must not check the functions of this file.
#define DT_UNSEEN __attribute__((no_sanitize("thread")))

dim3 threadIdx, blockIdx, blockDim, gridDim;

// Stores the stack pointer in `*from` and goes on with the stack `to`, which this function has stored or begin() has
// made. swapcontext() would do, but it also swaps the signal masks, and its system calls took half of the tests' time.
extern "C" void cuda_on_cpu_switch_stack(void** from, void* to);
asm(R"(
.pushsection .text
.type cuda_on_cpu_switch_stack, @function
cuda_on_cpu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch_stack, . - cuda_on_cpu_switch_stack
.popsection
)");

namespace cuda_on_cpu {

Order order = Order::kForwards;
int num_launches = 0;
int worst_ulps = 1;

namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Barrier {
  unsigned size = 0, arrived = 0, generation = 0;
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* stack_pointer = nullptr;
  bool is_done = false;
  double exchanged[2] = {};  // with its warp; used in turn, so that the next exchange cannot overwrite this one
  unsigned turn = 0;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tsan = nullptr;
#endif
};

void* scheduler_stack_pointer = nullptr;
#if defined(__SANITIZE_ADDRESS__)
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif
#if defined(__SANITIZE_THREAD__)
void* scheduler_tsan = nullptr;
#endif
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Barrier> warps;
Barrier block;
const std::function<void()>* body = nullptr;
unsigned idle_turns = 0;  // switches since a fiber last made progress

DT_UNSEEN void enter(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack.get(), kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.tsan, 0);
#endif
  cuda_on_cpu_switch_stack(&scheduler_stack_pointer, fiber.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

DT_UNSEEN void leave(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fiber.is_done ? nullptr : &fiber.fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(scheduler_tsan, __tsan_switch_to_fiber_no_sync);
#endif
  cuda_on_cpu_switch_stack(&fiber.stack_pointer, scheduler_stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

DT_UNSEEN Fiber& current() { return *fibers[threadIdx.x]; }

DT_UNSEEN void run_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  Fiber& fiber = current();
  (*body)();
#if defined(__SANITIZE_THREAD__)
  __tsan_release(&block);
#endif
  fiber.is_done = true;
  idle_turns = 0;
  leave(fiber);
  std::abort();  // nothing enters a fiber that is done
}

// Makes the next enter() of the fiber call run_fiber().
DT_UNSEEN void begin(Fiber& fiber) {
  fiber.is_done = false;
#if defined(__SANITIZE_ADDRESS__)
  // The fiber that had this stack left the borders of its frames marked.
  ASAN_UNPOISON_MEMORY_REGION(fiber.stack.get(), kStackBytes);
#endif
  // The switch pops six registers and returns into run_fiber, which expects the stack that a call makes: its top is a
  // return address, 8 bytes below a multiple of 16.
  const uintptr_t end = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStackBytes) & ~uintptr_t{15};
  void** const first = reinterpret_cast<void**>(end) - 8;
  std::fill(first, first + 8, nullptr);
  first[6] = reinterpret_cast<void*>(&run_fiber);
  fiber.stack_pointer = first;
}

DT_UNSEEN void wait(Barrier& barrier) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(&barrier);
#endif
  idle_turns = 0;
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) {
    if (++idle_turns > 2 * blockDim.x) {
      std::fprintf(stderr, "a barrier is not reached by all threads of its block or warp\n");
      std::abort();
    }
    leave(current());
  }
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&barrier);
#endif
}

template <class Read>
DT_UNSEEN auto exchange(unsigned mask, double value, const Read& read) {
  if (mask != 0xffffffffu) std::abort();
  const unsigned lane = threadIdx.x % kWarp, first = threadIdx.x - lane;
  const unsigned turn = current().turn++ % 2;
  current().exchanged[turn] = value;
  wait(warps[threadIdx.x / kWarp]);
  return read(lane, [first, turn](unsigned of_lane) { return fibers[first + of_lane]->exchanged[turn]; });
}

DT_UNSEEN void run_block(unsigned threads) {
  block = {threads};
  warps.assign(threads / kWarp, {kWarp});
  while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = *fibers[i];
    begin(fiber);
#if defined(__SANITIZE_THREAD__)
    if (fiber.tsan == nullptr) fiber.tsan = __tsan_create_fiber(0);
    scheduler_tsan = __tsan_get_current_fiber();
#endif
  }
  for (unsigned left = threads; left > 0;) {
    for (unsigned i = 0; i < threads; ++i) {
      threadIdx.x = order == Order::kForwards ? i : threads - 1 - i;
      if (current().is_done) continue;
      enter(current());
      left -= current().is_done;
    }
  }
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&block);
#endif
}

}  // namespace

DT_UNSEEN cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  ++num_launches;
  const unsigned blocks = config.gridDim.x, threads = config.blockDim.x;
  if (blocks == 0 || threads == 0 || threads > 1024 || threads % kWarp != 0) return cudaErrorInvalidConfiguration;
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  body = &thread;
  for (unsigned i = 0; i < blocks; ++i) {
    blockIdx.x = order == Order::kForwards ? i : blocks - 1 - i;
    run_block(threads);
  }
  return cudaSuccess;
}

}  // namespace cuda_on_cpu

void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::block); }

void __syncwarp(unsigned mask) {
  if (mask != 0xffffffffu) std::abort();
  cuda_on_cpu::wait(cuda_on_cpu::warps[threadIdx.x / cuda_on_cpu::kWarp]);
}

unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return cuda_on_cpu::exchange(mask, value, [](unsigned, const auto& value_of) {
    double largest = 0;
    for (unsigned lane = 0; lane < cuda_on_cpu::kWarp; ++lane) {
      largest = value_of(lane) > largest ? value_of(lane) : largest;
    }
    return static_cast<unsigned>(largest);
  });
}

unsigned __ballot_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::exchange(mask, predicate != 0 ? 1 : 0, [](unsigned, const auto& value_of) {
    unsigned bits = 0;
    for (unsigned lane = 0; lane < cuda_on_cpu::kWarp; ++lane) bits |= static_cast<unsigned>(value_of(lane)) << lane;
    return bits;
  });
}

double __shfl_down_sync(unsigned mask, double value, unsigned delta) {
  return cuda_on_cpu::exchange(mask, value, [delta](unsigned lane, const auto& value_of) {
    return value_of(lane + delta < cuda_on_cpu::kWarp ? lane + delta : lane);
  });
}

namespace drivetrain::formats {
namespace {

float perturbed(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto number = static_cast<uint32_t>(2 * cuda_on_cpu::worst_ulps + 1);
  const int ulps = static_cast<int>((bits * 2654435761u >> 16) % number) - cuda_on_cpu::worst_ulps;
  if ((bits & 0x7fffffffu) >= 0x7f000000u || (bits & 0x7fffffffu) == 0) return value;
  bits += static_cast<uint32_t>(ulps);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

}  // namespace

// These functions are declared in ranged_float.cuh.
float approximate_reciprocal(float x) { return perturbed(1.0f / x); }
float approximate_reciprocal_root(float x) {
  return perturbed(static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))));
}

}  // namespace drivetrain::formats

double __shfl_xor_sync(unsigned mask, double value, unsigned lanes) {
  return cuda_on_cpu::exchange(mask, value,
                               [lanes](unsigned lane, const auto& value_of) { return value_of(lane ^ lanes); });
}

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInvalidConfiguration"; }
const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus*, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return cudaErrorInvalidConfiguration;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, void (*)(void*), unsigned, unsigned) {
  return cudaErrorInvalidConfiguration;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaErrorInvalidConfiguration; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaErrorInvalidConfiguration;
}
