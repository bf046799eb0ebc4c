// A device for torch whose streams run later, in any order that their events allow. Its memory holds rubbish from when
// it is allocated, in the order of the stream that does, and again from when it is freed, as soon as torch's allocators
// may give it to others. So a copy that waits for the wrong stream shows in what it copies.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

struct Work {
  std::function<bool()> may_run;
  std::function<void()> run;
};

// Reached once what a stream had enqueued before has run.
using Moment = std::shared_ptr<bool>;

int64_t current = 0, num_streams = 10, num_hidden = 0;  // streams below 10 are the test's own
std::map<int64_t, std::deque<Work>> queues;

void enqueue(int64_t stream, std::function<void()> run) {
  queues[stream].push_back({[] { return true; }, std::move(run)});
}

Moment moment_of(int64_t stream) {
  auto moment = std::make_shared<bool>(false);
  enqueue(stream, [moment] { *moment = true; });
  return moment;
}

void await(int64_t stream, const Moment& moment) {
  queues[stream].push_back({[moment] { return *moment; }, [] {}});
}

void run_all(uint64_t seed) {
  std::mt19937_64 random(seed);
  for (;;) {
    std::vector<std::deque<Work>*> able;
    bool is_empty = true;
    for (auto& [stream, queue] : queues) {
      if (queue.empty()) continue;
      is_empty = false;
      if (queue.front().may_run()) able.push_back(&queue);
    }
    if (is_empty) return;
    if (able.empty()) throw std::runtime_error("all streams wait for each other");
    std::deque<Work>& queue = *able[random() % able.size()];
    const Work work = std::move(queue.front());
    queue.pop_front();
    work.run();
  }
}

// ---- Memory. Nothing is really freed before the end: what is read too late is rubbish, not a crash.

struct Block {
  std::vector<char> bytes;
  int64_t stream;
  std::set<int64_t> users;
  bool is_others = false;  // somebody else may have it

  void spoil() { std::fill(bytes.begin(), bytes.end(), '\xa5'); }
};
std::vector<std::unique_ptr<Block>> blocks;
int64_t num_late = 0;  // copies from or to memory that was others'

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  const int64_t hidden = --num_hidden;
  await(hidden, moment_of(block->stream));
  for (const int64_t user : block->users) await(hidden, moment_of(user));
  enqueue(hidden, [block] {
    block->spoil();
    block->is_others = true;
  });
}

struct LateAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Block* block = blocks.emplace_back(new Block{std::vector<char>(size), current, {}}).get();
    enqueue(current, [block] { block->spoil(); });
    return {block->bytes.data(), block, &free_block, kDevice};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
LateAllocator allocator;

// ---- What torch asks of a device.

struct LateGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(num_streams++); }
  c10::Stream exchangeStream(c10::Stream other) const override { return stream(std::exchange(current, other.id())); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment;
    *static_cast<Moment*>(*event) = moment_of(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    await(stream.id(), *static_cast<Moment*>(event));
  }
  bool queryEvent(void* event) const override { return **static_cast<Moment*>(event); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    static_cast<Block*>(data.get_context())->users.insert(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, LateGuard)

struct LateHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
LateHooks hooks;

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> memory_format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!non_blocking) throw std::runtime_error("the host waits for a copy");
  const auto host = from.is_cpu() ? from : to;  // torch's pinned memory lives until its copies have ended
  const auto* block = static_cast<const Block*>((from.is_cpu() ? to : from).storage().data_ptr().get_context());
  enqueue(current, [host, block, source = from.const_data_ptr(), target = to.mutable_data_ptr(), size = from.nbytes()] {
    num_late += block->is_others;
    std::memcpy(target, source, size);
  });
  return to;
}

// Element by element, of contiguous float tensors, in the order of the current stream.
at::Tensor exp(const at::Tensor& x) {
  at::Tensor y = at::empty(x.sizes(), x.options());
  enqueue(current, [to = y.mutable_data_ptr<float>(), from = x.const_data_ptr<float>(), numel = x.numel()] {
    std::transform(from, from + numel, to, [](float value) { return std::exp(value); });
  });
  return y;
}

at::Tensor mul(const at::Tensor& x, const at::Tensor& y) {
  at::Tensor z = at::empty(x.sizes(), x.options());
  enqueue(current, [to = z.mutable_data_ptr<float>(), a = x.const_data_ptr<float>(), b = y.const_data_ptr<float>(),
                    numel = x.numel()] { std::transform(a, a + numel, b, to, std::multiplies<float>()); });
  return z;
}

at::Tensor& zero_(at::Tensor& x) {
  enqueue(current, [to = x.mutable_data_ptr<float>(), numel = x.numel()] { std::fill_n(to, numel, 0.0F); });
  return x;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("exp", &exp);
  m.impl("mul.Tensor", &mul);
  m.impl("zero_", &zero_);
  m.impl("as_strided", [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                          std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(
        self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
        offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
  });
  m.impl("empty.memory_format", &empty);
  m.impl("_copy_from", &copy_from);
  m.impl("view", [](const at::Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
}

// ---- What the test does there, on the current stream.

template <class Value>
at::Tensor full(Value value, int64_t numel) {
  at::Tensor tensor = at::empty({numel}, at::TensorOptions(c10::CppTypeToScalarType<Value>::value).device(kDevice));
  auto* data = tensor.mutable_data_ptr<Value>();
  enqueue(current, [data, numel, value] { std::fill_n(data, numel, value); });
  return tensor;
}

void fill(at::Tensor tensor, int32_t value) {
  enqueue(current, [data = tensor.mutable_data_ptr<int32_t>(), numel = tensor.numel(), value] {
    std::fill_n(data, numel, value);
  });
}

template <class Value>
struct Reading {
  std::shared_ptr<std::vector<Value>> values;
};

template <class Value>
Reading<Value> read_later(const at::Tensor& tensor) {
  Reading<Value> reading{std::make_shared<std::vector<Value>>(tensor.numel())};
  const auto* data = tensor.const_data_ptr<Value>();
  enqueue(current, [values = reading.values, data] { std::copy_n(data, values->size(), values->begin()); });
  return reading;
}

template <class Value>
void register_reading(pybind11::module_& m, const char* name) {
  pybind11::class_<Reading<Value>>(m, name).def("values",
                                                [](const Reading<Value>& reading) { return *reading.values; });
}

}  // namespace

PYBIND11_MODULE(late_device, m) {
  c10::register_privateuse1_backend("late");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  register_reading<int32_t>(m, "Reading");
  register_reading<float>(m, "FloatReading");
  m.def("full", &full<int32_t>);
  m.def("full_float", &full<float>);
  m.def("fill", &fill);
  m.def("read", &read_later<int32_t>);
  m.def("read_float", &read_later<float>);
  m.def("set_stream", [](int64_t stream) { current = stream; });
  m.def("run", &run_all);
  m.def("num_streams", [] { return num_streams - 10; });
  m.def("num_late", [] { return num_late; });
  m.def("clear", [] { blocks.clear(); });
}
