// Errors of the program under test: printed at once; the process ends, or a test runner asks for them afterwards.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core.h"

namespace fake_cuda {

namespace {

struct Reports {
  std::mutex mutex;
  std::vector<std::string> texts;
};
Reports& reports() {
  static auto* all = new Reports;
  return *all;
}

}  // namespace

uint64_t number_from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 0);
}

bool dies_of_errors() {
  const char* mode = std::getenv("FAKE_CUDA_ON_ERROR");
  return mode == nullptr || std::strcmp(mode, "record") != 0;
}

void report(const char* kind, const std::string& text) {
  const std::string line = std::string(kind) + ": " + text;
  {
    const std::lock_guard<std::mutex> lock(reports().mutex);
    reports().texts.push_back(line);
  }
  std::fprintf(stderr, "fake_cuda: %s\n", line.c_str());
  std::fflush(stderr);
  if (dies_of_errors()) {
    std::fprintf(stderr, "fake_cuda: the process ends here; FAKE_CUDA_ON_ERROR=record goes on.\n");
    std::fflush(stderr);
    _exit(86);
  }
}

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_API void fake_cuda_report(const char* kind, const char* text) { report(kind, text); }

FAKE_CUDA_API uint64_t fake_cuda_num_errors() {
  const std::lock_guard<std::mutex> lock(reports().mutex);
  return reports().texts.size();
}

FAKE_CUDA_API size_t fake_cuda_error_text(uint64_t index, char* text, size_t bytes) {
  const std::lock_guard<std::mutex> lock(reports().mutex);
  if (index >= reports().texts.size()) return 0;
  const std::string& found = reports().texts[index];
  if (bytes > 0) {
    std::strncpy(text, found.c_str(), bytes - 1);
    text[bytes - 1] = '\0';
  }
  return found.size() + 1;
}
