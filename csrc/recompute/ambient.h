// Declares the ambient state of a function call, which a recomputation restores: random states, autocast, and switches
// that choose kernels.
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <vector>

namespace drivetrain::recompute {

// The states of the default generators of the CPU and of all accelerator devices. An accelerator that is not
// initialized is left out, because reading its state would initialize it. Methods take the GIL if they need it.
class RandomStates {
 public:
  static RandomStates now();
  static RandomStates now_of(c10::Device device);  // of the CPU and this device
  RandomStates current() const;                    // of the generators that this object covers
  void restore() const;
  size_t num_devices() const { return devices_.size(); }
  static size_t num_devices_now();

 private:
  struct DeviceState {
    size_t index;
    at::Tensor state;  // uint8, on the CPU, so that reading it needs no synchronization
  };

  explicit RandomStates(const at::mt19937& engine) : engine_(engine) {}
  static RandomStates of_cpu();
  void add(size_t device);

  at::mt19937 engine_;
  std::optional<float> next_float_normal_;  // normal numbers are drawn in pairs
  std::optional<double> next_double_normal_;
  std::vector<DeviceState> devices_;
};

// Sets random states as long as the object lives.
class RandomStatesGuard {
 public:
  explicit RandomStatesGuard(const RandomStates* states);  // null: does nothing
  ~RandomStatesGuard();
  RandomStatesGuard(const RandomStatesGuard&) = delete;
  RandomStatesGuard& operator=(const RandomStatesGuard&) = delete;

 private:
  std::optional<RandomStates> before_;
};

// Chooses the dtypes of results: the autocast state of a thread, for every device type, and the default dtype.
class Autocast {
 public:
  static Autocast now();
  void set() const;
  bool has_default_dtype_of_now() const { return default_dtype_ == at::get_default_dtype(); }
  bool operator==(const Autocast&) const = default;

 private:
  struct DeviceSetting {
    bool enabled;
    at::ScalarType dtype;
    bool operator==(const DeviceSetting&) const = default;
  };
  std::array<DeviceSetting, at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size()> devices_;
  bool is_cache_enabled_;
  caffe2::TypeMeta default_dtype_;
};

// Switches of the whole process that choose the kernels of an operation.
class Switches {
 public:
  static Switches now();
  void set() const;
  bool operator==(const Switches&) const = default;

 private:
  bool is_onednn_enabled_;
  bool is_deterministic_;
  bool only_warns_;                                             // of operations that are not deterministic
  std::optional<at::Float32MatmulPrecision> matmul_precision_;  // none: torch's settings for backends differ
};

// Sets switches as long as the object lives, if they differ from the current ones.
class SwitchesGuard {
 public:
  explicit SwitchesGuard(const Switches& switches);
  ~SwitchesGuard();
  SwitchesGuard(const SwitchesGuard&) = delete;
  SwitchesGuard& operator=(const SwitchesGuard&) = delete;

 private:
  const Switches before_;
  const bool is_set_;
};

// Sets the autocast state of this thread, and the default dtype, as long as the object lives.
class AutocastGuard {
 public:
  explicit AutocastGuard(const Autocast& autocast);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  const Autocast before_;
};

}  // namespace drivetrain::recompute
