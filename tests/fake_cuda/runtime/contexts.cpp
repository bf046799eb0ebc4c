// Follows each device's primary context: which call of which thread has made it.
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <sstream>

#include "core.h"

namespace fake_cuda {

namespace {

constexpr int kMostDevices = 64;

struct Contexts {
  std::mutex mutex;
  std::atomic<bool> exists[kMostDevices] = {};
  std::string texts[kMostDevices];
};
Contexts& contexts() {
  static auto* all = new Contexts;
  return *all;
}

// Returns the stack of this thread: Python's, if it has one, and the functions of shared libraries. Takes no GIL, which
// another thread may hold while it waits for this one.
std::string stack_now() {
  const int file = memfd_create("fake_cuda_stack", MFD_CLOEXEC);
  if (file < 0) return "";
  dump_stacks(file);
  std::string text(static_cast<size_t>(lseek(file, 0, SEEK_END)), '\0');
  text.resize(static_cast<size_t>(std::max<ssize_t>(0, pread(file, text.data(), text.size(), 0))));
  close(file);
  return text;
}

}  // namespace

void dump_stacks(int file) {
  using DumpTraceback = void (*)(int, void*);
  using ThisThread = void* (*)();
  const auto dump = reinterpret_cast<DumpTraceback>(dlsym(RTLD_DEFAULT, "_Py_DumpTraceback"));
  const auto thread = reinterpret_cast<ThisThread>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  void* frames[24];
  const int count = backtrace(frames, 24);
  backtrace_symbols_fd(frames + 2, count - 2, file);
  if (dump != nullptr && thread != nullptr) {
    if (void* of_python = thread()) dump(file, of_python);
  }
}

void use_context(const char* call) {
  if (!is_executor()) make_context(current_device, call);
}

void make_context(int device, const char* call) {
  Contexts& all = contexts();
  if (device >= kMostDevices || all.exists[device].load(std::memory_order_relaxed)) return;
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  std::ostringstream text;
  text << call << " on thread " << name << (gettid() == getpid() ? ", the main one" : "") << ":\n" << stack_now();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.exists[device].load()) return;
  all.texts[device] = text.str();
  all.exists[device] = true;
}

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_API size_t fake_cuda_context_of(int device, char* text, size_t bytes) {
  Contexts& all = contexts();
  if (device < 0 || device >= kMostDevices || !all.exists[device].load()) return 0;
  const std::lock_guard<std::mutex> lock(all.mutex);
  return copy_text(all.texts[device], text, bytes);
}
