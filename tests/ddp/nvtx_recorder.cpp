// Records the NVTX ranges of a process in the file that NVTX_RECORD names, as a profiler would. A test compiles it and
// names it in NVTX_INJECTION64_PATH. The declarations are those of NVTX 3's binary interface (nvtxDetail/nvtxTypes.h).
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>

namespace {

struct Attributes {  // nvtxEventAttributes_t
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char* message;
};

struct Callbacks {  // NvtxExportTableCallbacks
  size_t size;
  int (*get_functions)(int module, void**** functions, unsigned* count);
};

constexpr uint32_t kCallbacks = 1;  // NVTX_ETID_CALLBACKS
constexpr int kCore = 1;            // NVTX_CB_MODULE_CORE
constexpr unsigned kPushEx = 8, kPush = 9, kPop = 11;

std::mutex mutex;
thread_local int depth = 0;

void write(const std::string& line) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::ofstream(std::getenv("NVTX_RECORD"), std::ios::app) << line << "\n";
}

int push(const char* name) {
  write("push " + std::string(name));
  return depth++;
}

int push_ex(const Attributes* attributes) { return push(attributes->message); }

int pop() {
  write("pop");
  return --depth;
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(const void* (*get_table)(uint32_t)) {
  const auto* const callbacks = static_cast<const Callbacks*>(get_table(kCallbacks));
  void*** functions = nullptr;
  unsigned count = 0;
  if (callbacks == nullptr || callbacks->get_functions(kCore, &functions, &count) == 0 || count <= kPop) return 0;
  *functions[kPushEx] = reinterpret_cast<void*>(push_ex);
  *functions[kPush] = reinterpret_cast<void*>(push);
  *functions[kPop] = reinterpret_cast<void*>(pop);
  return 1;
}
