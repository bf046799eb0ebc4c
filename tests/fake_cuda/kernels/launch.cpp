// Enqueues kernels on fake streams and checks the bytes that each accessed for races.
#include <cstdlib>
#include <memory>
#include <string>

#include "accesses.h"
#include "cuda_runtime.h"
#include "fake_cuda.h"
#include "fake_cuda_kernels.h"

namespace fake_cuda_kernels {

namespace {

thread_local const char* name_of_launches = nullptr;

struct Launch {
  cudaLaunchConfig_t config;
  std::function<void()> thread;
};

int run(void* context) {
  const auto& launch = *static_cast<Launch*>(context);
  fake_cuda_open();  // the kernel uses the host's addresses of device memory
  begin_accesses();
  const cudaError_t error = cuda_on_cpu::run(launch.config, launch.thread);
  fake_cuda_close();
  check_accesses();
  return error == cudaSuccess ? FAKE_CUDA_DONE : FAKE_CUDA_FAILED;
}

// Turns "... [with Params = {drivetrain::optim::StepStart}]" into "our kernel(drivetrain::optim::StepStart)".
std::string name_of(const std::string& signature) {
  const size_t open = signature.find('{'), close = signature.rfind('}');
  if (open == std::string::npos || close == std::string::npos) return signature;
  return "our kernel(" + signature.substr(open + 1, close - open - 1) + ")";
}

}  // namespace

Named::Named(const char* name) : former_(name_of_launches) { name_of_launches = name; }
Named::~Named() { name_of_launches = former_; }

cudaError_t enqueue(const cudaLaunchConfig_t& config, const char* signature, std::function<void()> thread) {
  const unsigned threads = config.blockDim.x;
  if (config.gridDim.x == 0 || threads == 0 || threads > 1024) return cudaErrorInvalidConfiguration;
  const std::string name =
      name_of_launches != nullptr ? "our kernel, " + std::string(name_of_launches) : name_of(signature);
  auto launch = std::make_unique<Launch>(Launch{config, std::move(thread)});
  const int error = fake_cuda_enqueue(
      config.stream, name.c_str(), &run, launch.release(), [](void* context) { delete static_cast<Launch*>(context); },
      nullptr, 0);
  return static_cast<cudaError_t>(error);
}

}  // namespace fake_cuda_kernels
