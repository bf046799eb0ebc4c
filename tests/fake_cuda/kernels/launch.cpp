// Enqueues kernels on fake streams and checks the bytes that each accessed for races.
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accesses.h"
#include "cuda_runtime.h"
#include "fake_cuda.h"

namespace fake_cuda_kernels {

namespace {

struct Launch {
  cudaLaunchConfig_t config;
  std::function<void()> thread;
};

int run(void* context) {
  const auto& launch = *static_cast<Launch*>(context);
  static const bool is_seeded = [] {
    const char* const seed = std::getenv("FAKE_CUDA_SEED");
    cuda_on_cpu::set_seed(seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1);
    return true;
  }();
  static_cast<void>(is_seeded);
  fake_cuda_open();  // the kernel uses the host's addresses of device memory
  begin_accesses();
  cuda_on_cpu::run(launch.config, launch.thread);
  fake_cuda_close();
  check_accesses();
  return FAKE_CUDA_DONE;
}

// Reads the functions of the library that contains `kernel` from its table of symbols, by their offset in the library.
// dladdr() finds no kernel, as a kernel's symbol is not exported.
std::map<uintptr_t, std::string> read_functions(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::map<uintptr_t, std::string> functions;
  if (bytes.size() < sizeof(Elf64_Ehdr)) return functions;
  const auto* elf = reinterpret_cast<const Elf64_Ehdr*>(bytes.data());
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(bytes.data() + elf->e_shoff);
  for (unsigned i = 0; i < elf->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(bytes.data() + sections[i].sh_offset);
    const char* names = bytes.data() + sections[sections[i].sh_link].sh_offset;
    for (size_t s = 0; s < sections[i].sh_size / sizeof(Elf64_Sym); ++s) {
      if (ELF64_ST_TYPE(symbols[s].st_info) == STT_FUNC) functions[symbols[s].st_value] = names + symbols[s].st_name;
    }
  }
  return functions;
}

// Returns "our kernel " and the kernel's name with its template arguments.
std::string name_of(const void* kernel) {
  Dl_info library = {};
  if (dladdr(kernel, &library) == 0) return "our kernel";
  static const auto functions = read_functions(library.dli_fname);
  const auto found =
      functions.find(reinterpret_cast<uintptr_t>(kernel) - reinterpret_cast<uintptr_t>(library.dli_fbase));
  if (found == functions.end()) return "our kernel (the library has no table of symbols)";
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name{
      abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, &status), &std::free};
  return "our kernel " + (name ? std::string(name.get()) : found->second);
}

}  // namespace

cudaError_t enqueue(const cudaLaunchConfig_t& config, const cuda_on_cpu::Kernel& kernel, std::function<void()> thread) {
  if (const cudaError_t error = cuda_on_cpu::check(config, kernel)) return error;
  auto launch = std::make_unique<Launch>(Launch{config, std::move(thread)});
  const int error = fake_cuda_enqueue(
      config.stream, name_of(kernel.code).c_str(), &run, launch.release(),
      [](void* context) { delete static_cast<Launch*>(context); }, nullptr, 0);
  return static_cast<cudaError_t>(error);
}

}  // namespace fake_cuda_kernels
