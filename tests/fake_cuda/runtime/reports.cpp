// Reports errors of the program under test. Each is printed at once; then the process ends, or tests read it later.
#include <dlfcn.h>
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

size_t copy_text(const std::string& from, char* to, size_t bytes) {
  if (bytes > 0) {
    std::strncpy(to, from.c_str(), bytes - 1);
    to[bytes - 1] = '\0';
  }
  return from.size() + 1;
}

bool dies_of_errors() {
  const char* mode = std::getenv("FAKE_CUDA_ON_ERROR");
  return mode == nullptr || std::strcmp(mode, "record") != 0;
}

namespace {

thread_local std::string python_line;

// Looks up a function of Python by name, because not every process that preloads the stand-in has an interpreter.
template <class Function>
Function python(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

const std::string& location() { return python_line; }

void note_location() {
  static const bool is_wanted = number_from_environment("FAKE_CUDA_TRACE", 0) != 0;
  if (!is_wanted) return;
  using Object = void*;
  static const auto thread = python<Object (*)()>("PyGILState_GetThisThreadState");
  static const auto ensure = python<int (*)()>("PyGILState_Ensure");
  static const auto release = python<void (*)(int)>("PyGILState_Release");
  static const auto frame_now = python<Object (*)()>("PyEval_GetFrame");
  static const auto line_of = python<int (*)(Object)>("PyFrame_GetLineNumber");
  static const auto code_of = python<Object (*)(Object)>("PyFrame_GetCode");
  static const auto back_of = python<Object (*)(Object)>("PyFrame_GetBack");
  static const auto attribute = python<Object (*)(Object, const char*)>("PyObject_GetAttrString");
  static const auto text_of = python<const char* (*)(Object)>("PyUnicode_AsUTF8");
  static const auto decref = python<void (*)(Object)>("Py_DecRef");
  static const auto incref = python<void (*)(Object)>("Py_IncRef");
  python_line.clear();
  if (back_of == nullptr || thread == nullptr || thread() == nullptr) return;
  const int held = ensure();
  Object frame = frame_now();
  if (frame != nullptr) incref(frame);
  while (frame != nullptr) {
    const Object code = code_of(frame), file = attribute(code, "co_filename");
    const std::string name = text_of(file);
    if (name.find("/torch/") == std::string::npos) python_line = name + ":" + std::to_string(line_of(frame));
    decref(file);
    decref(code);
    const Object back = python_line.empty() ? back_of(frame) : nullptr;
    decref(frame);
    frame = back;
  }
  release(held);
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
    std::fprintf(stderr, "fake_cuda: the process ends here; set FAKE_CUDA_ON_ERROR=record to go on.\n");
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
  return copy_text(reports().texts[index], text, bytes);
}
