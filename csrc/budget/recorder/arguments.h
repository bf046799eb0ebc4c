// Defines helpers that find the tensors among the boxed arguments of an operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>

namespace drivetrain::budget {

inline bool is_defined_tensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// Calls function(tensor, element) for every defined tensor of an argument; element is -1 unless the argument is a list.
template <class Function>
void for_each_tensor(const c10::IValue& value, const Function& function) {
  if (is_defined_tensor(value)) {
    function(value.toTensor(), -1);
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    const auto list = value.toListRef();
    for (size_t i = 0; i < list.size(); ++i) {
      if (is_defined_tensor(list[i])) function(list[i].toTensor(), static_cast<int32_t>(i));
    }
  }
}

// Returns the first argument that is a device, else the device of the first tensor, else the CPU.
inline c10::Device device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice()) return argument.toDevice();
    for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t) { device = device.value_or(tensor.device()); });
  }
  return device.value_or(c10::kCPU);
}

inline at::Tensor tensor_in(const c10::IValue& value, int32_t element) {
  return element < 0 ? value.toTensor() : value.toListRef()[element].toTensor();
}

}  // namespace drivetrain::budget
