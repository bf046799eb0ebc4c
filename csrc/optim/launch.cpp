// The step's loops on threads and streams; see launch.h.
#include "optim/launch.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "base/current_stream.h"
#include "optim/cuda_step.h"
#include "optim/device_table.h"
#include "optim/precision.h"

namespace drivetrain::optim {
namespace {

// Copies the job's tables to the device, on its current stream, and launches there.
void run_step_cuda(c10::Device device, StepJob job) {
  const c10::DeviceGuard guard(device);
  if (is_capturing(current_stream(device))) {
    throw UnsupportedError("Muon's step cannot be captured into a CUDA graph: call it outside of the capture.");
  }
  std::vector<char> bytes;
  append_bytes(bytes, job.params, job.num_params);
  const size_t params_bytes = bytes.size();
  append_bytes(bytes, job.rules, job.num_rules);
  const at::Tensor on_device = uploaded(bytes, device);
  job.params = static_cast<const ParamJob*>(on_device.data_ptr());
  job.rules = reinterpret_cast<const RuleArgs*>(static_cast<const char*>(on_device.data_ptr()) + params_bytes);
  step_cuda(job, current_stream(device));
}

}  // namespace

void run_step_cpu(const StepJob& job, int64_t begin, int64_t end) {
  const auto step = for_chosen_isa(baseline::step_cpu, avx2::step_cpu, avx512::step_cpu);
  constexpr int64_t kGrain = (1 << 15) / kBlock;  // blocks that are worth a thread
  at::parallel_for(begin / kBlock, num_blocks(end), kGrain, [&](int64_t from, int64_t to) {
    step(job, std::max(from * kBlock, begin), std::min(to * kBlock, end));
  });
}

void run_step(c10::Device device, const StepJob& job) {
  if (device.is_cpu()) {
    run_step_cpu(job, 0, job.total);
  } else {
    run_step_cuda(device, job);
  }
}

int num_step_threads() {
  std::atomic<int> threads{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) { ++threads; });
  return threads;
}

}  // namespace drivetrain::optim
