// Implements device memory: one memory file, mapped twice. The host's mapping is protected; work uses the other one.
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "core.h"

namespace fake_cuda {

namespace {

// Each device has far more addresses than memory, so that no address is used twice.
constexpr uintptr_t kDeviceSpan = uintptr_t{1} << 38;
constexpr size_t kLarge = 2 << 20, kSmall = 512, kPage = 4096;

struct Allocation {
  size_t bytes = 0;
  int device = -1;
  uint64_t number = 0;  // counts device allocations, from 1
};

struct Memory {
  std::mutex mutex;
  int file = -1;
  uintptr_t begin = 0, end = 0;
  intptr_t offset = 0;  // distance from the host's mapping to the one for work
  std::map<uintptr_t, Allocation> allocations;
  std::map<uintptr_t, Allocation> freed;  // device allocations, for reports
  std::map<uintptr_t, Allocation> pinned;
  size_t pinned_bytes = 0, peak_pinned_bytes = 0;  // in whole pages
  std::vector<uintptr_t> next;
  std::vector<size_t> used;
  uint64_t num_allocations = 0;
  int num_open = 0;
  bool is_open_by_fault = false;
  struct sigaction former = {};
};

std::atomic<Memory*> mapped{nullptr};

void protect(const Memory& memory, bool is_open) {
  mprotect(reinterpret_cast<void*>(memory.begin), memory.end - memory.begin,
           is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

// Handles SIGSEGV on the thread that accessed device memory. That thread must hold no lock of malloc or of reports.cpp,
// because the handler takes both.
void on_fault(int signal_number, siginfo_t* info, void* context) {
  Memory* memory = mapped.load();
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (memory == nullptr || address < memory->begin || address >= memory->end) {
    if (memory != nullptr && (memory->former.sa_flags & SA_SIGINFO) != 0) {
      memory->former.sa_sigaction(signal_number, info, context);
    } else if (memory != nullptr && memory->former.sa_handler != SIG_DFL && memory->former.sa_handler != SIG_IGN) {
      memory->former.sa_handler(signal_number);
    } else {
      signal(SIGSEGV, SIG_DFL);  // the repeated access then ends the process
    }
    return;
  }
  const bool writes = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
  std::ostringstream text;
  text << (is_executor() ? "work on a stream " : "the host ") << (writes ? "writes" : "reads") << " device memory at "
       << describe_address(address);
  if (is_executor() && running()) text << ", in " << running()->info->describe();
  const std::string writer = last_writer(address);
  if (!writer.empty()) text << ", last written by " << writer;
  dump_stacks(STDERR_FILENO);
  report("host access", text.str());  // ends the process, unless errors are only recorded
  memory->is_open_by_fault = true;
  protect(*memory, true);
}

Memory& memory() {
  if (Memory* made = mapped.load()) return *made;
  static std::mutex making;
  const std::lock_guard<std::mutex> lock(making);
  if (Memory* made = mapped.load()) return *made;
  auto* made = new Memory;
  const size_t span = kDeviceSpan * static_cast<size_t>(num_devices());
  made->file = memfd_create("fake_cuda", MFD_CLOEXEC);
  if (made->file < 0 || ftruncate(made->file, static_cast<off_t>(span)) != 0) {
    std::perror("fake_cuda: cannot create the memory file");
    std::abort();
  }
  void* host = mmap(nullptr, span, PROT_NONE, MAP_SHARED | MAP_NORESERVE, made->file, 0);
  void* work = mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, made->file, 0);
  if (host == MAP_FAILED || work == MAP_FAILED) {
    std::perror("fake_cuda: cannot map the address space of devices");
    std::abort();
  }
  madvise(work, span, MADV_DONTDUMP);
  madvise(host, span, MADV_DONTDUMP);
  made->begin = reinterpret_cast<uintptr_t>(host);
  made->end = made->begin + span;
  made->offset = static_cast<intptr_t>(reinterpret_cast<uintptr_t>(work) - made->begin);
  made->used.resize(static_cast<size_t>(num_devices()));
  for (int device = 0; device < num_devices(); ++device) {
    made->next.push_back(made->begin + kDeviceSpan * static_cast<size_t>(device) + kLarge);
  }
  mapped.store(made);
  void* frame[1];
  backtrace(frame, 1);  // loads its library now, which a signal handler must not do
  struct sigaction action = {};
  action.sa_sigaction = &on_fault;
  // The alternate stack, which faulthandler allocates, is too small for a report: it would write beyond its end.
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &made->former);
  return *made;
}

const std::pair<const uintptr_t, Allocation>* find(const std::map<uintptr_t, Allocation>& all, uintptr_t address) {
  auto after = all.upper_bound(address);
  if (after == all.begin()) return nullptr;
  --after;
  return address < after->first + std::max<size_t>(after->second.bytes, 1) ? &*after : nullptr;
}

std::string hex(uintptr_t address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%zx", static_cast<size_t>(address));
  return text;
}

size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Returns whether a page of the range is page-locked. The caller holds the mutex.
bool overlaps_pinned(const Memory& all, uintptr_t begin, size_t bytes) {
  const auto after = all.pinned.lower_bound(begin + bytes);
  if (after == all.pinned.begin()) return false;
  const auto& [last, allocation] = *std::prev(after);
  return last + in_pages(allocation.bytes) > begin;
}

void add_pinned(Memory& all, uintptr_t begin, size_t bytes) {
  all.pinned[begin] = {bytes, -1, 0};
  all.pinned_bytes += in_pages(bytes);
  all.peak_pinned_bytes = std::max(all.peak_pinned_bytes, all.pinned_bytes);
}

}  // namespace

bool has_pinned(const void* address, size_t bytes) {
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return overlaps_pinned(all, reinterpret_cast<uintptr_t>(address), bytes);
}

size_t device_bytes() {
  static const size_t bytes = number_from_environment("FAKE_CUDA_MEMORY_MIB", 2048) << 20;
  return bytes;
}

bool is_in_arena(uintptr_t address) {
  const Memory* made = mapped.load();
  return made != nullptr && address >= made->begin && address < made->end;
}

void* view(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return reinterpret_cast<void*>(is_in_arena(at) ? at + static_cast<uintptr_t>(mapped.load()->offset) : at);
}

Place place_of(const void* pointer) {
  Memory& all = memory();
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard<std::mutex> lock(all.mutex);
  Place place;
  if (is_in_arena(address)) {
    place.kind = Kind::kDevice;
    if (const auto* found = find(all.allocations, address)) {
      place = {Kind::kDevice, found->second.device, found->first, found->second.bytes, true};
    }
  } else if (const auto* found = find(all.pinned, address)) {
    place = {Kind::kPinned, -1, found->first, found->second.bytes, true};
  }
  return place;
}

std::string describe_address(uintptr_t address) {
  Memory& all = memory();
  std::ostringstream text;
  text << hex(address);
  const std::unique_lock<std::mutex> lock(all.mutex, std::try_to_lock);
  if (!lock) return text.str();
  const auto* found = find(all.allocations, address);
  const auto* gone = found == nullptr ? find(all.freed, address) : nullptr;
  if (found == nullptr && gone == nullptr) {
    if (const auto* host = find(all.pinned, address)) {
      text << " (byte " << address - host->first << " of " << host->second.bytes << " in pinned memory)";
      return text.str();
    }
    if (is_in_arena(address)) text << " (in no allocation)";
    return text.str();
  }
  const auto& of = found != nullptr ? *found : *gone;
  text << " (byte " << address - of.first << " of " << of.second.bytes << " in allocation " << of.second.number
       << " of device " << of.second.device << (gone != nullptr ? ", which cudaFree has given back" : "") << ")";
  return text.str();
}

void close_after_fault() {
  Memory* made = mapped.load();
  if (made == nullptr || !made->is_open_by_fault) return;
  const std::lock_guard<std::mutex> lock(made->mutex);
  made->is_open_by_fault = false;
  if (made->num_open == 0) protect(*made, false);
}

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_API void* fake_cuda_view(const void* address) { return view(address); }

FAKE_CUDA_API void fake_cuda_arena(uintptr_t* begin, uintptr_t* end) {
  *begin = memory().begin;
  *end = memory().end;
}

FAKE_CUDA_API void fake_cuda_open() {
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.num_open++ == 0) protect(all, true);
}

FAKE_CUDA_API void fake_cuda_close() {
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (--all.num_open == 0) protect(all, false);
}

FAKE_CUDA_API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  use_context(__func__);
  if (pointer == nullptr) return fail(cudaErrorInvalidValue);
  {
    const Lock lock(state().mutex);
    if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  }
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto device = static_cast<size_t>(current_device);
  const size_t unit = bytes >= kLarge / 2 ? kLarge : kSmall, size = (bytes + unit - 1) / unit * unit;
  const uintptr_t end = all.begin + kDeviceSpan * (device + 1);
  const uintptr_t begin = (all.next[device] + unit - 1) / unit * unit;
  if (all.used[device] + size > device_bytes() || begin + size + kSmall > end) return fail(cudaErrorMemoryAllocation);
  all.next[device] = begin + size + kSmall;  // leaves a gap, so that accesses beyond the end are found
  all.used[device] += size;
  all.allocations[begin] = {bytes, current_device, ++all.num_allocations};
  // New memory gets a pattern, so that a read of memory that was never written gives values that no test expects.
  constexpr size_t kSpoiled = 32 << 20;
  std::memset(view(reinterpret_cast<void*>(begin)), 0xA5, std::min(bytes, kSpoiled));
  *pointer = reinterpret_cast<void*>(begin);
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaFree(void* pointer) {
  use_context(__func__);
  if (pointer == nullptr) return cudaSuccess;
  const Place place = place_of(pointer);
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  if (!place.is_known || place.kind != Kind::kDevice || place.begin != begin) return fail(cudaErrorInvalidValue);
  {
    // The call waits for the device, as in CUDA.
    Lock lock(state().mutex);
    if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
    std::vector<OpRef> ops;
    for (Stream* stream : state().streams) {
      if (stream->device == place.device && stream->last) ops.push_back(stream->last);
    }
    if (const cudaError_t error = wait_for(lock, ops, "cudaFree")) return error;
  }
  forget_accesses(begin, place.bytes);
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const size_t unit = place.bytes >= kLarge / 2 ? kLarge : kSmall, size = (place.bytes + unit - 1) / unit * unit;
  all.freed[begin] = all.allocations[begin];
  all.allocations.erase(begin);
  all.used[static_cast<size_t>(place.device)] -= size;
  const uintptr_t first = (begin + 4095) / 4096 * 4096, last = (begin + size) / 4096 * 4096;
  if (last > first) {
    fallocate(all.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first - all.begin),
              static_cast<off_t>(last - first));
  }
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  use_context(__func__);
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  *total = device_bytes();
  *free = device_bytes() - all.used[static_cast<size_t>(current_device)];
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  use_context(__func__);
  if (pointer == nullptr || flags > 7) return fail(cudaErrorInvalidValue);
  {
    const Lock lock(state().mutex);
    if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  }
  void* made = std::aligned_alloc(kPage, std::max(kPage, in_pages(bytes)));
  if (made == nullptr) return fail(cudaErrorMemoryAllocation);
  std::memset(made, 0xA5, bytes);
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  add_pinned(all, reinterpret_cast<uintptr_t>(made), bytes);
  *pointer = made;
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }

namespace {

// Reports work that still uses memory which is no longer page-locked: CUDA does not promise to wait for it.
void report_users(uintptr_t begin, size_t bytes) {
  std::string user;
  {
    const Lock lock(state().mutex);
    for (const Stream* stream : state().streams) {
      for (const OpRef& op : stream->queue) {
        for (const Range& range : op->work->ranges) {
          if (range.address < begin + bytes && begin < range.address + range.bytes) user = op->info->describe();
        }
      }
    }
  }
  if (!user.empty()) report("unregistered memory", "cudaHostUnregister of memory that " + user + " still uses");
}

cudaError_t unpin(void* pointer, bool frees) {
  use_context(frees ? "cudaFreeHost" : "cudaHostUnregister");
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  if (const Place place = place_of(pointer); !frees && place.kind == Kind::kPinned) {
    report_users(place.begin, place.bytes);
  }
  {
    // CUDA waits for the work that uses the memory; this waits for all streams.
    Lock lock(state().mutex);
    if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
    std::vector<OpRef> ops;
    for (Stream* stream : state().streams) {
      if (stream->last) ops.push_back(stream->last);
    }
    if (const cudaError_t error = wait_for(lock, ops, "cudaFreeHost")) return error;
  }
  Memory& all = memory();
  size_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.pinned.find(begin);
    if (found == all.pinned.end()) {
      return fail(frees ? cudaErrorInvalidValue : cudaErrorHostMemoryNotRegistered);
    }
    bytes = found->second.bytes;
    all.pinned.erase(found);
    all.pinned_bytes -= in_pages(bytes);
  }
  forget_accesses(begin, bytes);
  if (frees) std::free(pointer);
  return cudaSuccess;
}

}  // namespace

FAKE_CUDA_API cudaError_t cudaFreeHost(void* pointer) {
  return pointer == nullptr ? cudaSuccess : unpin(pointer, true);
}

FAKE_CUDA_API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  use_context(__func__);
  if (pointer == nullptr || bytes == 0) return fail(cudaErrorInvalidValue);
  {
    const Lock lock(state().mutex);
    if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  }
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  if (overlaps_pinned(all, begin, bytes)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  add_pinned(all, begin, bytes);
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaHostUnregister(void* pointer) { return unpin(pointer, false); }

FAKE_CUDA_API uint64_t fake_cuda_pinned_bytes() {
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.pinned_bytes;
}
FAKE_CUDA_API uint64_t fake_cuda_peak_pinned_bytes() {
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return std::exchange(all.peak_pinned_bytes, all.pinned_bytes);
}

FAKE_CUDA_API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  use_context(__func__);
  const Place place = place_of(pointer);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->device = place.is_known ? std::max(place.device, 0) : -2;
  attributes->type = cudaMemoryTypeUnregistered;
  if (place.kind == Kind::kDevice && place.is_known) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (place.kind == Kind::kPinned) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}
