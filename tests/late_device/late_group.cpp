// Implements a process group for the late device's tensors only, as NCCL is one for CUDA tensors. Collectives use a
// gloo backend and run on a stream of their own. As with NCCL, a wait blocks the current stream, not the host.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "late_device.h"

namespace late {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor gloo_view(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device() == kDevice, "tensor is on ", tensor.device(), "; the late process group expects ",
              kDevice);
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(),
              "tensor is not dense; the late process group expects dense tensors");
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions(tensor.scalar_type()));
}

Tensors gloo_view(const Tensors& tensors) {
  Tensors aliases;
  for (const at::Tensor& tensor : tensors) aliases.push_back(gloo_view(tensor));
  return aliases;
}

class LateWork final : public c10d::Work {
 public:
  LateWork(Moment moment, c10::intrusive_ptr<c10::ivalue::Future> future)
      : moment_(std::move(moment)), future_(std::move(future)) {}
  bool isCompleted() override {
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    return moment_->is_reached;
  }
  bool isSuccess() const override { return true; }
  void synchronize() override { await(current_stream(), moment_); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const Moment moment_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class LateBackend final : public c10d::Backend {
 public:
  explicit LateBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(new_hidden_stream()) {}

  const std::string getBackendName() const override { return "late"; }
  void abort() override { *is_aborted_ = true; }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start(tensors, [gloo = gloo_, on_host = gloo_view(tensors), options]() mutable {
      gloo->allreduce(on_host, options)->wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start(tensors, [gloo = gloo_, on_host = gloo_view(tensors), options]() mutable {
      gloo->broadcast(on_host, options)->wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> outputs_on_host;
    for (const Tensors& tensors : outputs) outputs_on_host.push_back(gloo_view(tensors));
    return start(outputs[0], [gloo = gloo_, outputs_on_host, inputs_on_host = gloo_view(inputs), options]() mutable {
      gloo->allgather(outputs_on_host, inputs_on_host, options)->wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return start({output}, [gloo = gloo_, to = gloo_view(output), from = gloo_view(input), options]() mutable {
      gloo->_allgather_base(to, from, options)->wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    auto work = start({}, [gloo = gloo_, options] { gloo->barrier(options)->wait(); });
    wait_on_host(moment_of(stream_));
    return work;
  }

 private:
  c10::intrusive_ptr<c10d::Work> start(const Tensors& tensors, std::function<void()> run) {
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    await(stream_, moment_of(current_stream()));
    // The work keeps the tensors alive until it has run.
    enqueue(stream_, [run = std::move(run), tensors, is_aborted = is_aborted_] {
      const at::AutoDispatchBelowAutograd no_autograd;
      if (*is_aborted) return;
      try {
        run();
      } catch (const std::exception&) {  // for example, a rank has ended: NCCL's kernel would spin
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (!*is_aborted) {
          if (std::chrono::steady_clock::now() > deadline) throw;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
    });
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, kDevice, stream_));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{kDevice});
    future->markCompleted(c10::IValue(tensors));
    return c10::make_intrusive<LateWork>(moment_of(stream_), std::move(future));
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const int64_t stream_;
  const std::shared_ptr<std::atomic<bool>> is_aborted_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

void bind_group(pybind11::module_& m) {
  m.def("make_backend", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<LateBackend>(gloo);
  });
}

}  // namespace late
