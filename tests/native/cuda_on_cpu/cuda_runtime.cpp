// Runs a block's threads as fibers: each runs to its next barrier, in an order drawn at random; see cuda_runtime.h.
//
// Fibers run one at a time, but the thread sanitizer sees them as threads that barriers order, as on a GPU. Exchanges
// within a warp order no memory, and nothing orders two blocks of a launch. No sanitizer may check this file.
#include "cuda_runtime.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#if defined(CUDA_ON_CPU_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CUDA_ON_CPU_THREAD)
#include <sanitizer/tsan_interface.h>
// The sanitizer forgets the accesses to memory that Java allocates; no function of C or C++ gives a variable anew.
extern "C" {
void __tsan_java_init(uintptr_t heap, uintptr_t bytes);
void __tsan_java_alloc(uintptr_t begin, uintptr_t bytes);
void __tsan_java_free(uintptr_t begin, uintptr_t bytes);
}
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#error "compile this file without a sanitizer, and define CUDA_ON_CPU_ADDRESS or CUDA_ON_CPU_THREAD"
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

// Kernels' entries, and the borders that shared_memory.ld defines.
extern "C" {
extern const unsigned char* const __start___patchable_function_entries[] __attribute__((visibility("hidden")));
extern const unsigned char* const __stop___patchable_function_entries[] __attribute__((visibility("hidden")));
extern uint64_t cuda_on_cpu_shared_begin[] __attribute__((visibility("hidden")));
extern uint64_t cuda_on_cpu_shared_end[] __attribute__((visibility("hidden")));
}

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

int num_launches = 0;
int worst_ulps = 1;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kMaxParamBytes = 4096;  // more need an architecture of 7.0 and CUDA 12.1
constexpr unsigned char kNoOperation = 0x90;

// So many blocks of a launch have fibers of their own. A later block reuses those of an earlier one, which orders them.
#if defined(CUDA_ON_CPU_THREAD)
constexpr unsigned kUnorderedBlocks = 8;
#else
constexpr unsigned kUnorderedBlocks = 1;
#endif

struct Call {
  const char* name;  // one address for each name
  Where where;
  uint64_t path;  // stands for the calls that led to it

  bool operator==(const Call& other) const {
    return name == other.name && where.line() == other.where.line() && path == other.path;
  }
};

// The threads [first, first + size) of a block, which wait for each other.
struct Team {
  unsigned first = 0, size = 0, arrived = 0, turn = 0, first_arrived = 0;
  Call call = {};
  char order[2] = {};  // used in turn: a thread that goes on must not order those that have yet to go on
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* stack_pointer = nullptr;
  bool is_done = false;
  double exchanged[2] = {};  // with its warp; used in turn, so that the next exchange cannot overwrite this one
  unsigned turn = 0;
#if defined(CUDA_ON_CPU_ADDRESS)
  void* fake_stack = nullptr;
#endif
#if defined(CUDA_ON_CPU_THREAD)
  void* tsan = __tsan_create_fiber(0);
  unsigned switch_flags = 0;
#endif
};

// Each block has new teams, whose addresses the thread sanitizer does not know.
struct Block {
  Team all, warps[kMaxThreads / kWarp];
  std::vector<unsigned> ready;  // threads that wait for nothing
};

void* scheduler_stack_pointer = nullptr;
#if defined(CUDA_ON_CPU_ADDRESS)
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif
#if defined(CUDA_ON_CPU_THREAD)
void* scheduler_tsan = nullptr;
char launch_end = 0;  // its address orders a launch before what follows it
#endif
std::vector<std::unique_ptr<Fiber>> fibers;
size_t first_fiber = 0;  // of the current block
std::unique_ptr<Block> block;
const std::function<void()>* body = nullptr;
uint64_t random_state = 1;

// Returns a number below `count`.
unsigned draw(size_t count) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>((random_state >> 33) % count);
}

template <class... Args>
[[noreturn]] void fail(const char* format, Args... args) {
  std::fprintf(stderr, "wrong kernel, block %u: ", blockIdx.x);
  std::fprintf(stderr, format, args...);
  std::abort();
}

Fiber& current() { return *fibers[first_fiber + threadIdx.x]; }

void enter(Fiber& fiber) {
#if defined(CUDA_ON_CPU_ADDRESS)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack.get(), kStackBytes);
#endif
#if defined(CUDA_ON_CPU_THREAD)
  // The first switch orders the launch's beginning before the thread.
  __tsan_switch_to_fiber(fiber.tsan, std::exchange(fiber.switch_flags, __tsan_switch_to_fiber_no_sync));
#endif
  cuda_on_cpu_switch_stack(&scheduler_stack_pointer, fiber.stack_pointer);
#if defined(CUDA_ON_CPU_ADDRESS)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

void leave(Fiber& fiber) {
#if defined(CUDA_ON_CPU_ADDRESS)
  __sanitizer_start_switch_fiber(fiber.is_done ? nullptr : &fiber.fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
#if defined(CUDA_ON_CPU_THREAD)
  __tsan_switch_to_fiber(scheduler_tsan, __tsan_switch_to_fiber_no_sync);
#endif
  cuda_on_cpu_switch_stack(&fiber.stack_pointer, scheduler_stack_pointer);
#if defined(CUDA_ON_CPU_ADDRESS)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

void run_fiber() {
#if defined(CUDA_ON_CPU_ADDRESS)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  (*body)();
#if defined(CUDA_ON_CPU_THREAD)
  __tsan_release(&launch_end);
#endif
  current().is_done = true;
  leave(current());
  std::abort();  // nothing enters a fiber that is done
}

// Makes the next enter() of the fiber call run_fiber().
void begin(Fiber& fiber) {
  fiber.is_done = false;
#if defined(CUDA_ON_CPU_ADDRESS)
  // The fiber that had this stack left the borders of its frames marked.
  ASAN_UNPOISON_MEMORY_REGION(fiber.stack.get(), kStackBytes);
#endif
#if defined(CUDA_ON_CPU_THREAD)
  fiber.switch_flags = 0;
#endif
  // The switch pops six registers and returns into run_fiber, which expects the stack that a call makes: its top is a
  // return address, 8 bytes below a multiple of 16.
  const uintptr_t end = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStackBytes) & ~uintptr_t{15};
  void** const first = reinterpret_cast<void**>(end) - 8;
  std::fill(first, first + 8, nullptr);
  first[6] = reinterpret_cast<void*>(&run_fiber);
  fiber.stack_pointer = first;
}

// Combines the return addresses of a frame and its callers. A function that is called from two places has two paths.
uint64_t path_of(void* const* frame) {
  const char* const stack = current().stack.get();
  uint64_t path = 0;
  for (; reinterpret_cast<const char*>(frame) >= stack && reinterpret_cast<const char*>(frame) < stack + kStackBytes;
       frame = static_cast<void* const*>(frame[0])) {
    path = path * 31 + reinterpret_cast<uintptr_t>(frame[1]);
  }
  return path;
}

// Waits until all threads of the team have made the same call.
void wait(Team& team, const Call& call) {
  if (team.arrived == 0) {
    team.call = call;
    team.first_arrived = threadIdx.x;
  } else if (!(call == team.call)) {
    fail("thread %u calls %s at %s:%u%s, where thread %u of the same %s calls %s at %s:%u\n", threadIdx.x, call.name,
         call.where.file_name(), call.where.line(),
         call.where.line() == team.call.where.line() ? " by another path" : "", team.first_arrived,
         &team == &block->all ? "block" : "warp", team.call.name, team.call.where.file_name(), team.call.where.line());
  }
  if (++team.arrived < team.size) return leave(current());
  team.arrived = 0;
  ++team.turn;
  for (unsigned i = team.first; i < team.first + team.size; ++i) {
    if (i != threadIdx.x) block->ready.push_back(i);
  }
}

// Orders what the team did before the call before what it does after it.
void wait_in_order(Team& team, const Call& call) {
#if defined(CUDA_ON_CPU_THREAD)
  char* const order = &team.order[team.turn % 2];
  __tsan_release(order);
#endif
  wait(team, call);
#if defined(CUDA_ON_CPU_THREAD)
  __tsan_acquire(order);
#endif
}

void check_mask(const char* name, Where where, unsigned mask) {
  if (mask == 0xffffffffu) return;
  fail("%s at %s:%u has a mask other than 0xffffffff\n", name, where.file_name(), where.line());
}

template <class Read>
auto exchange(const char* name, Where where, void* const* frame, unsigned mask, double value, const Read& read) {
  check_mask(name, where, mask);
  const unsigned lane = threadIdx.x % kWarp, first = threadIdx.x - lane;
  const unsigned turn = current().turn++ % 2;
  current().exchanged[turn] = value;
  wait(block->warps[threadIdx.x / kWarp], {name, where, path_of(frame)});
  return read(lane, [first, turn](unsigned of_lane) { return fibers[first_fiber + first + of_lane]->exchanged[turn]; });
}

// Fills shared memory with NaN and -1, or with huge numbers, before a block begins.
void fill_shared_memory() {
  const uint64_t value = draw(2) == 0 ? ~uint64_t{0} : 0x7f7f7f7f7f7f7f7fu;
  std::fill(cuda_on_cpu_shared_begin, cuda_on_cpu_shared_end, value);
#if defined(CUDA_ON_CPU_THREAD)
  const auto begin = reinterpret_cast<uintptr_t>(cuda_on_cpu_shared_begin);
  const uintptr_t bytes = reinterpret_cast<uintptr_t>(cuda_on_cpu_shared_end) - begin;
  static const bool is_known = (__tsan_java_init(begin, bytes), true);
  if (is_known && bytes > 0) {
    __tsan_java_alloc(begin, bytes);
    __tsan_java_free(begin, bytes);
  }
#endif
}

void run_block(unsigned threads) {
  block = std::make_unique<Block>();
  block->ready.reserve(threads);
  block->all.size = threads;
  for (unsigned warp = 0; warp < threads / kWarp; ++warp) {
    block->warps[warp].first = warp * kWarp;
    block->warps[warp].size = kWarp;
  }
  fill_shared_memory();
  while (fibers.size() < first_fiber + threads) fibers.push_back(std::make_unique<Fiber>());
  std::vector<unsigned>& ready = block->ready;
  for (unsigned i = 0; i < threads; ++i) {
    begin(*fibers[first_fiber + i]);
    ready.push_back(i);
  }
  unsigned left = threads;
  while (!ready.empty()) {
    std::swap(ready[draw(ready.size())], ready.back());
    threadIdx.x = ready.back();
    ready.pop_back();
    enter(current());
    left -= current().is_done;
  }
  const auto check = [left](const Team& team) {
    if (team.arrived == 0) return;
    fail("%s at %s:%u is reached by %u of the %u threads of its %s, and %u threads wait in all\n", team.call.name,
         team.call.where.file_name(), team.call.where.line(), team.arrived, team.size,
         &team == &block->all ? "block" : "warp", left);
  };
  for (const Team& warp : block->warps) check(warp);
  check(block->all);
}

struct Limits {
  unsigned threads = kMaxThreads, registers = kMaxRegisters;
};

// Reads what __launch_bounds__ or __maxnreg__ has written into the code of a kernel.
Limits limits_of(const void* code) {
  const auto* const begin = static_cast<const unsigned char*>(code);
  for (auto entry = __start___patchable_function_entries; entry < __stop___patchable_function_entries; ++entry) {
    const auto registers = begin - *entry;
    const auto is_none = [](unsigned char byte) { return byte == kNoOperation; };
    if (registers <= 0 || registers > kMaxRegisters || !std::all_of(*entry, begin, is_none)) continue;
    constexpr unsigned char kEndbr64[] = {0xf3, 0x0f, 0x1e, 0xfa};
    const unsigned char* const first = begin + (std::equal(kEndbr64, kEndbr64 + 4, begin) ? 4 : 0);
    const auto warps = std::find_if_not(first, first + kMaxThreads / kWarp, is_none) - first;
    return {static_cast<unsigned>(warps) * kWarp, static_cast<unsigned>(registers)};
  }
  return {};
}

}  // namespace

void set_seed(uint64_t seed) { random_state = seed; }

cudaError_t check(const cudaLaunchConfig_t& config, const Kernel& kernel) {
  const dim3 &grid = config.gridDim, &threads = config.blockDim;
  if (grid.x == 0 || grid.x > INT32_MAX || threads.x == 0 || threads.x > kMaxThreads || threads.x % kWarp != 0 ||
      grid.y * grid.z * threads.y * threads.z != 1 || config.dynamicSmemBytes != 0) {
    return cudaErrorInvalidConfiguration;
  }
  const Limits limits = limits_of(kernel.code);
  const bool has_registers = threads.x * ((limits.registers + 7) / 8 * 8) <= kRegisters;
  const bool fits = threads.x <= limits.threads && has_registers && kernel.bytes <= kMaxParamBytes;
  return fits ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

void run(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  ++num_launches;
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  body = &thread;
#if defined(CUDA_ON_CPU_THREAD)
  scheduler_tsan = __tsan_get_current_fiber();
#endif
  std::vector<unsigned> order(gridDim.x);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned i = 0; i < gridDim.x; ++i) {
    std::swap(order[i], order[i + draw(gridDim.x - i)]);
    blockIdx.x = order[i];
    first_fiber = i % kUnorderedBlocks * blockDim.x;
    run_block(blockDim.x);
  }
#if defined(CUDA_ON_CPU_THREAD)
  __tsan_acquire(&launch_end);
#endif
}

}  // namespace cuda_on_cpu

// The frame of the calling function, which begins the path to a call.
#define DT_FRAME static_cast<void* const*>(__builtin_frame_address(0))

void __syncthreads(cuda_on_cpu::Where where) {
  using namespace cuda_on_cpu;
  wait_in_order(block->all, {__func__, where, path_of(DT_FRAME)});
}

void __syncwarp(unsigned mask, cuda_on_cpu::Where where) {
  using namespace cuda_on_cpu;
  check_mask(__func__, where, mask);
  wait_in_order(block->warps[threadIdx.x / kWarp], {__func__, where, path_of(DT_FRAME)});
}

unsigned __reduce_max_sync(unsigned mask, unsigned value, cuda_on_cpu::Where where) {
  return cuda_on_cpu::exchange(__func__, where, DT_FRAME, mask, value, [](unsigned, const auto& value_of) {
    double largest = 0;
    for (unsigned lane = 0; lane < cuda_on_cpu::kWarp; ++lane) {
      largest = value_of(lane) > largest ? value_of(lane) : largest;
    }
    return static_cast<unsigned>(largest);
  });
}

unsigned __ballot_sync(unsigned mask, int predicate, cuda_on_cpu::Where where) {
  return cuda_on_cpu::exchange(__func__, where, DT_FRAME, mask, predicate != 0 ? 1 : 0,
                               [](unsigned, const auto& value_of) {
                                 unsigned bits = 0;
                                 for (unsigned lane = 0; lane < cuda_on_cpu::kWarp; ++lane)
                                   bits |= static_cast<unsigned>(value_of(lane)) << lane;
                                 return bits;
                               });
}

double __shfl_down_sync(unsigned mask, double value, unsigned delta, cuda_on_cpu::Where where) {
  return cuda_on_cpu::exchange(__func__, where, DT_FRAME, mask, value, [delta](unsigned lane, const auto& value_of) {
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

double __shfl_xor_sync(unsigned mask, double value, unsigned lanes, cuda_on_cpu::Where where) {
  return cuda_on_cpu::exchange(__func__, where, DT_FRAME, mask, value,
                               [lanes](unsigned lane, const auto& value_of) { return value_of(lane ^ lanes); });
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorLaunchOutOfResources ? "cudaErrorLaunchOutOfResources" : "cudaErrorInvalidConfiguration";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchOutOfResources ? "too many resources requested for launch"
                                                : "invalid configuration argument";
}

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
