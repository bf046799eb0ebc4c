// Copies tensors to the host and back through torch's device-independent streams and events; see offload.h.
#include "saved_tensors/offload.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/stream_order.h"
#include "base/torch_text.h"
#include "saved_tensors/saved_tensors.h"

namespace py = pybind11;

namespace drivetrain::saved_tensors {
namespace {

using c10::impl::VirtualGuardImpl;

// A stream for copies in one direction, whose events are numbered.
class CopyStream {
 public:
  explicit CopyStream(c10::Device device)
      : stream_(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)), mutex_(new std::mutex) {}

  const c10::Stream& stream() const { return stream_; }

  // Returns the work that is enqueued now.
  StreamUse use() {
    const std::lock_guard<std::mutex> lock(*mutex_);  // records events in the order of their turns
    const auto event = std::make_shared<DeviceEvent>(stream_.device());
    event->record(stream_);
    return {stream_, ++turns_, event};
  }

 private:
  c10::Stream stream_;
  std::unique_ptr<std::mutex> mutex_;
  uint64_t turns_ = 0;
};

// The streams of a device. Copies back must not queue behind copies to the host, so there are two.
struct CopyStreams {
  CopyStream out, in;
};

CopyStreams& copy_streams(c10::Device device) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, CopyStreams> all;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair key(device.type(), device.index());
  const auto known = all.find(key);
  if (known != all.end()) return known->second;
  return all.emplace(key, CopyStreams{CopyStream(device), CopyStream(device)}).first->second;
}

c10::Stream current_stream_of(c10::Device device) { return VirtualGuardImpl(device.type()).getStream(device); }

}  // namespace

Offloaded::Offloaded(std::shared_ptr<HostPool> pool, const at::Tensor& flat)
    : pool_(std::move(pool)), options_(flat.options()), numel_(flat.numel()) {}

Offloaded Offloaded::begin(const std::shared_ptr<HostPool>& pool, const at::Tensor& flat) {
  DT_INVARIANT(flat.dim() == 1 && flat.is_contiguous());
  const at::NoGradGuard no_grad;
  const c10::Device device = flat.device();
  Offloaded result(pool, flat);
  result.memory_ = pool->get(static_cast<int64_t>(flat.nbytes()), /*pinned=*/!device.is_cpu());
  pool->count_copy(result.nbytes());
  if (device.is_cpu()) {
    result.on_host().copy_(flat);
    return result;
  }
  CopyStream& out = copy_streams(device).out;
  run_after(out.stream(), current_stream_of(device));
  for (const StreamUse& use : result.memory_.uses()) use.event->block(out.stream());
  record_use(flat.storage(), out.stream());
  const c10::StreamGuard guard(out.stream());
  result.on_host().copy_(flat, /*non_blocking=*/true);
  const StreamUse use = out.use();
  result.copied_out_ = use.event;
  result.memory_.set_last_use(use);
  return result;
}

void Offloaded::await_copy_out() const {
  if (copied_out_) copied_out_->block(current_stream_of(options_.device()));
}

Offloaded::~Offloaded() {
  if (!on_device_.defined() || !stream_) return;
  try {
    record_use(on_device_.storage(), copy_streams(on_device_.device()).in.stream());
  } catch (...) {  // the device and its memory are lost
  }
}

void Offloaded::prefetch() {
  if (on_device_.defined()) return;
  const at::NoGradGuard no_grad;
  const c10::Device device = options_.device();
  const c10::DeviceGuard device_guard(device);
  at::Tensor flat = at::empty({numel_}, options_);
  pool_->count_copy(nbytes());
  if (device.is_cpu()) {
    on_device_ = flat.copy_(on_host());
    return;
  }
  CopyStream& in = copy_streams(device).in;
  const c10::Stream current = current_stream_of(device);
  run_after(in.stream(), current);
  for (const StreamUse& use : memory_.uses()) use.event->block(in.stream());
  on_device_ = std::move(flat);  // from here on the destructor knows about the copy
  stream_ = current;
  copied_back_.reset();
  const c10::StreamGuard guard(in.stream());
  on_device_.copy_(on_host(), /*non_blocking=*/true);
  const StreamUse use = in.use();
  copied_back_ = use.event;
  memory_.set_last_use(use);
}

at::Tensor Offloaded::take() {
  prefetch();
  if (stream_) {
    DT_INVARIANT(copied_back_);
    const c10::Stream current = current_stream_of(on_device_.device());
    copied_back_->block(current);
    // The allocator orders a free by the stream that owns the memory, so it must learn about this one.
    if (current != *stream_) record_use(on_device_.storage(), current);
    stream_.reset();
  }
  return std::exchange(on_device_, {});
}

at::Tensor Offloaded::host() const {
  for (const auto& event : {copied_out_, copied_back_}) {
    if (event) event->synchronize();
  }
  return on_host();
}

void Offloaded::copy_back_to(const at::Tensor& flat) {
  DT_INVARIANT(flat.numel() == numel_ && flat.is_contiguous() && flat.device() == options_.device());
  const at::NoGradGuard no_grad;
  pool_->count_copy(nbytes());
  if (flat.is_cpu()) {
    flat.copy_(on_host());
    return;
  }
  CopyStream& in = copy_streams(flat.device()).in;
  for (const StreamUse& use : memory_.uses()) use.event->block(in.stream());
  record_use(flat.storage(), in.stream());
  const c10::StreamGuard guard(in.stream());
  flat.copy_(on_host(), /*non_blocking=*/true);
  const StreamUse use = in.use();
  copied_back_ = use.event;
  memory_.set_last_use(use);
}

void Offloaded::await_copy_back() const {
  if (copied_back_) copied_back_->block(current_stream_of(options_.device()));
}

// Returns the copy on the host as a tensor of the original dtype.
at::Tensor Offloaded::on_host() const { return memory_.bytes().view(c10::typeMetaToScalarType(options_.dtype())); }

void register_offload(py::module_& m) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<Offloaded>(m, "Offloaded")
      .def_property_readonly("nbytes", &Offloaded::nbytes)
      .def("await_copy_out", &Offloaded::await_copy_out, no_gil())
      .def("prefetch", &Offloaded::prefetch, no_gil())
      .def("take", &Offloaded::take, no_gil())
      .def("host", &Offloaded::host, no_gil())
      .def("copy_back_to", &Offloaded::copy_back_to, py::arg("flat"), no_gil())
      .def("await_copy_back", &Offloaded::await_copy_back, no_gil())
      .def("is_back", &Offloaded::is_back, no_gil());
  const auto statistic = [](int64_t HostPoolStats::* field) {
    return [field](const HostPool& pool) { return pool.stats().*field; };
  };
  py::class_<HostPool, std::shared_ptr<HostPool>>(m, "OffloadPool")
      .def(py::init(&HostPool::make), py::arg("max_bytes"), py::arg("slab_bytes") = int64_t{64} << 20)
      .def(
          "begin",
          [](const std::shared_ptr<HostPool>& pool, const at::Tensor& tensor) {
            if (!tensor.is_contiguous()) {
              throw UserError(text("tensor has strides ", tensor.strides(), ", expected a contiguous tensor"));
            }
            return Offloaded::begin(pool, tensor.detach().view({-1}));
          },
          py::arg("tensor"), no_gil())
      .def_property_readonly("max_bytes", &HostPool::max_bytes)
      .def_property_readonly("bytes_in_use", statistic(&HostPoolStats::bytes_in_use))
      .def_property_readonly("peak_bytes_in_use", statistic(&HostPoolStats::peak_bytes_in_use))
      .def_property_readonly("bytes_reserved", statistic(&HostPoolStats::bytes_reserved))
      .def_property_readonly("num_slabs", statistic(&HostPoolStats::num_slabs))
      .def_property_readonly("num_copies", statistic(&HostPoolStats::num_copies))
      .def_property_readonly("bytes_copied", statistic(&HostPoolStats::bytes_copied));
}

}  // namespace drivetrain::saved_tensors
