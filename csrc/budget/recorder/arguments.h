// Defines helpers that find the tensors among the boxed arguments of an operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>

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

inline at::Tensor tensor_in(const c10::IValue& value, int32_t element) {
  return element < 0 ? value.toTensor() : value.toListRef()[element].toTensor();
}

}  // namespace drivetrain::budget
