// What surrounds a function besides its arguments, kept and put back: random numbers and autocast.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <vector>

namespace drivetrain::checkpoint {

// Of the default generators of the CPU and of every device of the accelerator, once that is initialised (asking would
// initialise it). Takes the GIL where it has to.
class RandomStates {
 public:
  static RandomStates now();
  static RandomStates now_of(c10::Device device);  // and the CPU's
  RandomStates same_now() const;                   // of the same generators as these
  void restore() const;
  size_t num_devices() const { return devices_.size(); }
  static size_t num_devices_now();

 private:
  struct OfDevice {
    size_t index;
    at::Tensor state;  // uint8, on the CPU; needs no synchronisation
  };

  explicit RandomStates(const at::mt19937& engine) : engine_(engine) {}
  static RandomStates of_cpu();
  void add(size_t device);

  at::mt19937 engine_;
  std::optional<float> next_float_normal_;  // normal numbers come in pairs
  std::optional<double> next_double_normal_;
  std::vector<OfDevice> devices_;
};

// Random states for as long as this object lives.
class RandomStatesGuard {
 public:
  explicit RandomStatesGuard(const RandomStates* states);  // null: leaves everything as it is
  ~RandomStatesGuard();
  RandomStatesGuard(const RandomStatesGuard&) = delete;
  RandomStatesGuard& operator=(const RandomStatesGuard&) = delete;

 private:
  std::optional<RandomStates> before_;
};

// Of this thread, for every type of device.
class Autocast {
 public:
  static Autocast now();
  void set() const;
  bool operator==(const Autocast&) const = default;

 private:
  struct OfDevice {
    bool enabled;
    at::ScalarType dtype;
    bool operator==(const OfDevice&) const = default;
  };
  std::array<OfDevice, at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size()> devices_;
  bool is_cache_enabled_;
};

class AutocastGuard {
 public:
  explicit AutocastGuard(const Autocast& autocast);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  const Autocast before_;
};

}  // namespace drivetrain::checkpoint
