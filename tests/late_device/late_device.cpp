// Implements a device for torch whose streams run late, in any order that their events allow. The allocating stream
// fills new memory with garbage. Freed memory is filled again as soon as torch's allocators could give it to another
// tensor. So a copy that waits for the wrong stream copies wrong values.
#include "late_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace late {
namespace {

struct Work {
  std::function<bool()> may_run;
  std::function<void()> run;
};

thread_local int64_t current = 0;
std::map<int64_t, double> times;           // of the streams, in the model
int64_t num_streams = 10, num_hidden = 0;  // streams below 10 belong to the test
// Queues and memory are never destroyed: threads of torch and cycles of Python free tensors until the process ends.
auto& queues = *new std::map<int64_t, std::deque<Work>>;  // holds no empty queue
bool host_may_wait = false;
int64_t num_waits = 0;     // host waits for copies and values
std::mt19937_64 drawn(0);  // draws the order of streams while the host waits

// Held by the thread that runs work. Others may enqueue work and free tensors meanwhile, as on a real device. Work may
// wait for Python's lock, which such a thread holds.
std::recursive_mutex& running() {
  static auto& mutex = *new std::recursive_mutex;
  return mutex;
}

bool run_one(std::mt19937_64& random) {
  std::unique_lock<std::recursive_mutex> lock(mutex());
  if (queues.empty()) return false;
  std::vector<int64_t> able;
  for (const auto& [stream, queue] : queues) {
    if (queue.front().may_run()) able.push_back(stream);
  }
  if (able.empty()) throw std::runtime_error("deadlock: every stream waits for another stream");
  const auto drawn_one = queues.find(able[random() % able.size()]);
  const Work work = std::move(drawn_one->second.front());
  drawn_one->second.pop_front();
  if (drawn_one->second.empty()) queues.erase(drawn_one);
  lock.unlock();
  work.run();
  return true;
}

void run_all(uint64_t seed) {
  const std::lock_guard<std::recursive_mutex> lock(running());
  std::mt19937_64 random(seed);
  while (run_one(random)) {
  }
}

void run_until(const Moment& moment) {
  if (!host_may_wait) throw std::runtime_error("the host waits for the device, which the test does not allow");
  while (!moment->is_reached && run_one(drawn)) {
  }
  if (!moment->is_reached) throw std::runtime_error("the host waits for a moment that no stream will reach");
  model.host = std::max(model.host, moment->time);
}

}  // namespace

Model model;

std::recursive_mutex& mutex() {
  static auto& mutex = *new std::recursive_mutex;
  return mutex;
}

int64_t current_stream() { return current; }

int64_t new_hidden_stream() {
  const std::lock_guard<std::recursive_mutex> lock(mutex());
  return --num_hidden;
}

void enqueue(int64_t stream, std::function<void()> run, double seconds) {
  const std::lock_guard<std::recursive_mutex> lock(mutex());
  const auto timed = [stream, seconds, begin = model.host, run = std::move(run)] {
    times[stream] = std::max(times[stream], begin) + seconds;
    run();
  };
  queues[stream].push_back({[] { return true; }, timed});
}

Moment moment_of(int64_t stream) {
  auto moment = std::make_shared<Point>();
  enqueue(stream, [moment, stream] { *moment = {true, times[stream]}; });
  return moment;
}

void await(int64_t stream, const Moment& moment) {
  const std::lock_guard<std::recursive_mutex> lock(mutex());
  const auto wait = [moment, stream] { times[stream] = std::max(times[stream], moment->time); };
  queues[stream].push_back({[moment] { return moment->is_reached; }, wait});
}

void wait_on_host(const Moment& moment) {
  const std::lock_guard<std::recursive_mutex> lock(running());
  ++num_waits;
  run_until(moment);
}

// ---- Memory. No block is freed, so that a late read gives garbage instead of a crash.

namespace {

struct Block {
  std::vector<char> bytes;
  int64_t stream;
  std::set<int64_t> users;
  bool is_others = false;  // may belong to another tensor

  void spoil() { std::fill(bytes.begin(), bytes.end(), '\xa5'); }
};
auto& blocks = *new std::vector<std::unique_ptr<Block>>;
auto& blocks_by_address = *new std::map<const char*, Block*>;
int64_t num_late = 0;  // reads and writes of memory that may belong to another tensor

Block* block_at(const void* data) {
  const auto after = blocks_by_address.upper_bound(static_cast<const char*>(data));
  if (after == blocks_by_address.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return static_cast<const char*>(data) < block->bytes.data() + block->bytes.size() ? block : nullptr;
}

void free_block(void* context) {
  const std::lock_guard<std::recursive_mutex> lock(mutex());
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
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    Block* block = blocks.emplace_back(new Block{std::vector<char>(size), current, {}}).get();
    if (size > 0) blocks_by_address[block->bytes.data()] = block;
    enqueue(current, [block] { block->spoil(); });
    return {block->bytes.data(), block, &free_block, kDevice};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
LateAllocator allocator;

// Holds pinned host memory, which copies may read late. It is never freed, since pinned memory outlives its copies.
auto& pinned = *new std::map<const char*, std::unique_ptr<char[]>>;
auto& pinned_sizes = *new std::map<const char*, size_t>;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    auto memory = std::make_unique<char[]>(size + 1);
    char* data = memory.get();
    pinned_sizes[data] = size + 1;
    pinned[data] = std::move(memory);
    return {data, data, [](void*) {}, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;

}  // namespace

const bool* is_others(const void* data) {
  const std::lock_guard<std::recursive_mutex> lock(mutex());
  const Block* block = block_at(data);
  return block ? &block->is_others : nullptr;
}

void count_late(const bool* is_others) {
  if (is_others != nullptr) num_late += *is_others;
}

namespace {

// ---- The interfaces that torch requires of a device.

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
  c10::Stream getNewStream(c10::Device, int) const override { return stream(num_streams++); }
  c10::Stream exchangeStream(c10::Stream other) const override { return stream(std::exchange(current, other.id())); }
  bool queryStream(const c10::Stream& one) const override { return queues.count(one.id()) == 0; }
  void synchronizeStream(const c10::Stream& one) const override { wait_on_host(moment_of(one.id())); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment;
    *static_cast<Moment*>(*event) = moment_of(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    await(stream.id(), *static_cast<Moment*>(event));
  }
  bool queryEvent(void* event) const override { return (*static_cast<Moment*>(event))->is_reached; }
  void synchronizeEvent(void* event) const override {
    const std::lock_guard<std::recursive_mutex> lock(running());
    run_until(*static_cast<Moment*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    if (Block* block = block_at(data.get())) block->users.insert(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, LateGuard)

struct LateHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard<std::recursive_mutex> lock(mutex());
    const auto after = pinned_sizes.upper_bound(static_cast<const char*>(data));
    if (after == pinned_sizes.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return static_cast<const char*>(data) < begin + size;
  }
};
LateHooks hooks;

// ---- Operations of the test on the current stream.

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

c10::Allocator* device_allocator() { return &allocator; }

}  // namespace late

PYBIND11_MODULE(late_device, m) {
  using namespace late;
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
  m.def("enqueue", [](std::function<void()> work) { enqueue(current, std::move(work)); });
  m.def("run", &run_all, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("seed", [](uint64_t seed) { drawn.seed(seed); });
  m.def("let_host_wait", [](bool may) { host_may_wait = may; });
  m.def("num_waits", [] { return num_waits; });
  m.def("num_streams", [] { return num_streams - 10; });
  m.def("num_late", [] { return num_late; });
  m.def("set_model", [](double seconds_per_byte, double seconds_per_flop) {
    model.seconds_per_byte = seconds_per_byte;
    model.seconds_per_flop = seconds_per_flop;
  });
  m.def("advance", [](double seconds) { model.host += seconds; });
  m.def("host_time", [] { return model.host; });
  bind_group(m);
}
