// Tensors as memory that is seen through sizes and strides: what an operation was called with, without its being alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <optional>

namespace drivetrain::budget {

constexpr c10::DispatchKeySet kPythonKeys({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

// A tensor among an operation's arguments: a view of a value, or one that was there before.
struct TensorRef {
  int32_t arg;
  int32_t element;  // of a list; -1: the argument itself
  int32_t value;    // -1: `direct`
  at::Tensor direct;
  uint32_t version = 0;
  size_t storage_bytes = 0;
  c10::DimVector sizes, strides;
  int64_t offset = 0;
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  std::optional<uint64_t> checksum;  // of what the operation read, where that is to be checked
};

// Whether its values are those of a storage, seen through sizes and strides.
bool is_plain(const at::Tensor& tensor);
bool covers_its_storage(const at::Tensor& tensor);

void describe(const at::Tensor& tensor, TensorRef& ref);
at::Tensor view_of(const at::Tensor& held, const TensorRef& ref);

// Of a tensor that was there before the pass.
bool is_freed(const TensorRef& ref);
bool is_written(const TensorRef& ref);

// The same memory and count of writes, without autograd's part.
at::Tensor alias_of(const at::Tensor& tensor);
// All of its storage, as elements of that type.
at::Tensor flat_of(const at::Tensor& tensor, caffe2::TypeMeta dtype);
at::Tensor bytes_of(const at::Tensor& tensor);
at::Tensor copy_of(const at::Tensor& tensor);
uint64_t hash_of_storage(const at::Tensor& tensor);
// Of what the tensor shows, whatever lies between; none: not in the CPU's memory.
std::optional<uint64_t> hash_of_elements(const at::Tensor& tensor);
bool has_bytes_of(const at::Tensor& one, const at::Tensor& other);  // of all of their storages
bool is_all_zero(const at::Tensor& tensor);

}  // namespace drivetrain::budget
