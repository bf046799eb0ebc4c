// Enqueues ATen's work: makes CPU views of device memory, finds the byte ranges in use, and draws random numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAException.h>
#include <omp.h>

#include <algorithm>

#include "operators.h"

namespace fake_aten {

at::Tensor over_device(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  void* data = fake_cuda_view(storage.unsafeGetStorageImpl()->mutable_data_ptr().get());
  c10::Storage cpu(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, c10::Device(c10::kCPU)),
                   nullptr, false);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(cpu), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                             tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

void add_ranges(std::vector<fake_cuda_range>& ranges, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  const auto item = static_cast<int64_t>(tensor.element_size());
  const char* data = static_cast<const char*>(tensor.const_data_ptr());
  // The dimensions are sorted from the innermost outwards, and contiguous ones become one run.
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) != 0) dims.push_back({tensor.stride(i), tensor.size(i)});
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first == run) run *= dims[inner++].second;
  int64_t num_runs = 1;
  for (size_t i = inner; i < dims.size(); ++i) num_runs *= dims[i].second;
  constexpr int64_t kMostRuns = 4096;
  if (num_runs > kMostRuns) {  // one range covers them all
    int64_t last = run - 1;
    for (size_t i = inner; i < dims.size(); ++i) last += dims[i].first * (dims[i].second - 1);
    ranges.push_back({data, static_cast<size_t>((last + 1) * item), writes});
    return;
  }
  for (int64_t number = 0; number < num_runs; ++number) {
    int64_t offset = 0, rest = number;
    for (size_t i = inner; i < dims.size(); ++i) {
      offset += rest % dims[i].second * dims[i].first;
      rest /= dims[i].second;
    }
    ranges.push_back({data + offset * item, static_cast<size_t>(run * item), writes});
  }
}

namespace {

struct QueuedKernel {
  std::string name;
  std::function<void()> function;
  bool is_deterministic, warns_only;
};

int run(void* context) {
  const auto& call = *static_cast<QueuedKernel*>(context);
  // The executor computes with one thread, so that results do not depend on the number of threads.
  static thread_local const bool is_set_up = [] {
    at::get_num_threads();
    omp_set_num_threads(1);
    return true;
  }();
  (void)is_set_up;
  const at::AutoDispatchBelowAutograd guard;
  try {
    call.function();
    return FAKE_CUDA_DONE;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    fake_cuda_report("failed work", (call.name + ": " + text.substr(0, text.find("\nException raised from"))).c_str());
    return FAKE_CUDA_FAILED;
  }
}

}  // namespace

void launch(const std::string& name, c10::Device device, const std::vector<fake_cuda_range>& ranges,
            std::function<void()> function) {
  auto* call = new QueuedKernel{name, std::move(function), false, false};
  const int error = fake_cuda_enqueue(
      c10::cuda::getCurrentCUDAStream(device.index()).stream(), name.c_str(), &run, call,
      [](void* context) { delete static_cast<QueuedKernel*>(context); }, ranges.data(), ranges.size());
  C10_CUDA_CHECK(static_cast<cudaError_t>(error));
}

std::function<at::Generator()> next_generator(const std::optional<at::Generator>& generator, c10::Device device,
                                              int64_t numel, std::vector<fake_cuda_range>& ranges) {
  const at::Generator chosen =
      generator.has_value() && generator->defined() ? *generator : at::globalContext().defaultGenerator(device);
  TORCH_CHECK(chosen.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              chosen.device().type(), "'");
  auto* of_cuda = chosen.get<at::CUDAGeneratorImpl>();
  // The offset advances as on a GPU: by a multiple of four that grows with the number of elements.
  const uint64_t increment = 4 * (1 + static_cast<uint64_t>(std::max<int64_t>(numel, 1) - 1) / (1 << 18));
  at::PhiloxCudaState state;
  {
    const std::lock_guard<std::mutex> lock(of_cuda->mutex_);
    state = of_cuda->philox_cuda_state(increment);
  }
  if (state.captured_) {
    ranges.push_back({state.seed_.ptr, 8, 0});
    ranges.push_back({state.offset_.ptr, 8, 0});
  }
  return [state] {
    const auto read = [](const void* at) { return *static_cast<const uint64_t*>(fake_cuda_view(at)); };
    const uint64_t seed = state.captured_ ? read(state.seed_.ptr) : state.seed_.val;
    const uint64_t offset = state.captured_ ? read(state.offset_.ptr) + state.offset_intragraph_ : state.offset_.val;
    return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15u + offset * 0xD1B54A32D192ED03u);
  };
}

}  // namespace fake_aten
