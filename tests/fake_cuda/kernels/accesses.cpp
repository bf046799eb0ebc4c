// Records every memory access of the kernels. They are compiled with the thread sanitizer's instrumentation, which
// calls the functions below. Only the executor's thread runs kernels, so no lock is needed.
#include "accesses.h"

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>

#include "fake_cuda.h"

namespace fake_cuda_kernels {

namespace {

constexpr uintptr_t kPage = 4096;

struct Page {
  std::bitset<kPage> touched[2];  // read, written
};

bool is_noting = false;
uintptr_t arena_begin = 0, arena_end = 0;
std::map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t last_number = 0;
Page* last = nullptr;

void note(const volatile void* pointer, size_t bytes, bool writes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address < arena_begin || address >= arena_end || !is_noting) return;
  for (uintptr_t at = address; at < address + bytes; ++at) {
    if (last == nullptr || at / kPage != last_number) {
      auto& page = pages[at / kPage];
      if (!page) page = std::make_unique<Page>();
      last = page.get();
      last_number = at / kPage;
    }
    last->touched[writes].set(at % kPage);
  }
}

void check(bool writes) {
  uintptr_t begin = 0, end = 0;
  const auto flush = [&] {
    if (end > begin) fake_cuda_check(reinterpret_cast<void*>(begin), end - begin, writes);
  };
  for (const auto& [number, page] : pages) {
    const auto& touched = page->touched[writes];
    if (touched.none()) continue;
    for (uintptr_t i = 0; i < kPage; ++i) {
      if (!touched[i]) continue;
      const uintptr_t at = number * kPage + i;
      if (at != end) {
        flush();
        begin = at;
      }
      end = at + 1;
    }
  }
  flush();
}

}  // namespace

void begin_accesses() {
  if (arena_end == 0) fake_cuda_arena(&arena_begin, &arena_end);
  pages.clear();
  last = nullptr;
  is_noting = true;
}

void check_accesses() {
  is_noting = false;
  check(false);
  check(true);
  pages.clear();
  last = nullptr;
}

}  // namespace fake_cuda_kernels

using fake_cuda_kernels::note;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, size_t bytes) { note(at, bytes, false); }
void __tsan_write_range(void* at, size_t bytes) { note(at, bytes, true); }

#define FAKE_CUDA_ACCESS(BYTES)                                           \
  void __tsan_read##BYTES(void* at) { note(at, BYTES, false); }           \
  void __tsan_write##BYTES(void* at) { note(at, BYTES, true); }           \
  void __tsan_unaligned_read##BYTES(void* at) { note(at, BYTES, false); } \
  void __tsan_unaligned_write##BYTES(void* at) { note(at, BYTES, true); } \
  void __tsan_volatile_read##BYTES(void* at) { note(at, BYTES, false); }  \
  void __tsan_volatile_write##BYTES(void* at) { note(at, BYTES, true); }
FAKE_CUDA_ACCESS(1)
FAKE_CUDA_ACCESS(2)
FAKE_CUDA_ACCESS(4)
FAKE_CUDA_ACCESS(8)
FAKE_CUDA_ACCESS(16)
#undef FAKE_CUDA_ACCESS

// The loads below guard function statics, which are never device memory, so they are not recorded.
int8_t __tsan_atomic8_load(const volatile int8_t* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_load(const volatile int* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
int64_t __tsan_atomic64_load(const volatile int64_t* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_fetch_add(volatile int* at, int value, int) {
  note(at, 4, true);
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
int64_t __tsan_atomic64_fetch_add(volatile int64_t* at, int64_t value, int) {
  note(at, 8, true);
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}

}  // extern "C"
