// Reads and restores random states, autocast and switches; see ambient.h.
#include "recompute/ambient.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <mutex>

namespace py = pybind11;

namespace drivetrain::recompute {
namespace {

at::CPUGeneratorImpl& cpu_generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

// Returns the accelerator that torch was built for, if a script has used it. Only torch's Python module knows that.
std::optional<c10::DeviceType> initialized_accelerator() {
  static const std::optional<c10::DeviceType> type = at::accelerator::getAccelerator();
  static std::atomic<bool> is_initialized = false;  // never becomes false again
  if (!type || is_initialized) return type;
  const py::gil_scoped_acquire gil;  // callers may run without it
  const std::string name = c10::DeviceTypeName(*type, /*lower_case=*/true);
  const py::object module = py::getattr(py::module_::import("torch"), name.c_str(), py::none());
  is_initialized = py::getattr(module, "_initialized", py::bool_(false)).cast<bool>();
  return is_initialized ? type : std::nullopt;
}

at::Generator generator_of_device(size_t index) {
  const c10::Device device(*at::accelerator::getAccelerator(), static_cast<c10::DeviceIndex>(index));
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

RandomStates RandomStates::of_cpu() {
  at::CPUGeneratorImpl& cpu = cpu_generator();
  const std::lock_guard<std::mutex> lock(cpu.mutex_);
  RandomStates states(cpu.engine());
  states.next_float_normal_ = cpu.next_float_normal_sample();
  states.next_double_normal_ = cpu.next_double_normal_sample();
  return states;
}

void RandomStates::add(size_t device) {
  at::Generator generator = generator_of_device(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  devices_.push_back({device, generator.get_state()});
}

RandomStates RandomStates::now() {
  RandomStates states = of_cpu();
  const size_t num_devices = num_devices_now();
  for (size_t device = 0; device < num_devices; ++device) states.add(device);
  return states;
}

RandomStates RandomStates::now_of(c10::Device device) {
  if (device.is_cpu()) return of_cpu();
  if (device.type() != initialized_accelerator() || !device.has_index()) return now();
  RandomStates states = of_cpu();
  states.add(static_cast<size_t>(device.index()));
  return states;
}

RandomStates RandomStates::current() const {
  RandomStates states = of_cpu();
  for (const DeviceState& device : devices_) states.add(device.index);
  return states;
}

size_t RandomStates::num_devices_now() {
  const auto type = initialized_accelerator();
  return type ? at::accelerator::deviceCount() : 0;
}

void RandomStates::restore() const {
  {
    at::CPUGeneratorImpl& cpu = cpu_generator();
    const std::lock_guard<std::mutex> lock(cpu.mutex_);
    cpu.set_engine(engine_);
    cpu.set_next_float_normal_sample(next_float_normal_);
    cpu.set_next_double_normal_sample(next_double_normal_);
  }
  for (const DeviceState& device : devices_) {
    at::Generator generator = generator_of_device(device.index);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(device.state);
  }
}

RandomStatesGuard::RandomStatesGuard(const RandomStates* states) {
  if (states == nullptr) return;
  before_ = states->current();
  states->restore();
}

RandomStatesGuard::~RandomStatesGuard() {
  if (before_) before_->restore();
}

Autocast Autocast::now() {
  Autocast autocast;
  for (size_t i = 0; i < autocast.devices_.size(); ++i) {
    const c10::DeviceType type = at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i];
    autocast.devices_[i] = {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
  }
  autocast.is_cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  autocast.default_dtype_ = at::get_default_dtype();
  return autocast;
}

void Autocast::set() const {
  for (size_t i = 0; i < devices_.size(); ++i) {
    const c10::DeviceType type = at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i];
    at::autocast::set_autocast_enabled(type, devices_[i].enabled);
    at::autocast::set_autocast_dtype(type, devices_[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(is_cache_enabled_);
  if (!has_default_dtype_of_now()) at::set_default_dtype(default_dtype_);
}

Switches Switches::now() {
  const at::Context& context = at::globalContext();
  Switches switches;
  switches.is_onednn_enabled_ = context.userEnabledMkldnn();
  switches.is_deterministic_ = context.deterministicAlgorithms();
  switches.only_warns_ = context.deterministicAlgorithmsWarnOnly();
  try {
    switches.matmul_precision_ = context.float32MatmulPrecision();
  } catch (const c10::Error&) {  // the script has set backends one by one
  }
  return switches;
}

void Switches::set() const {
  at::Context& context = at::globalContext();
  context.setUserEnabledMkldnn(is_onednn_enabled_);
  context.setDeterministicAlgorithms(is_deterministic_, only_warns_);
  if (!matmul_precision_) return;
  constexpr std::array kNames = {"highest", "high", "medium"};  // by at::Float32MatmulPrecision
  context.setFloat32MatmulPrecision(kNames.at(static_cast<size_t>(*matmul_precision_)));
}

SwitchesGuard::SwitchesGuard(const Switches& switches) : before_(Switches::now()), is_set_(before_ != switches) {
  if (is_set_) switches.set();
}

SwitchesGuard::~SwitchesGuard() {
  if (is_set_) before_.set();
}

AutocastGuard::AutocastGuard(const Autocast& autocast) : before_(Autocast::now()) {
  if (before_ != autocast) autocast.set();
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  if (before_ != Autocast::now()) before_.set();
}

}  // namespace drivetrain::recompute
