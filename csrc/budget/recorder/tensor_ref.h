// Declares TensorRef, which describes a tensor argument of a recorded operation without keeping its memory alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <optional>

namespace drivetrain::budget {

constexpr c10::DispatchKeySet kPythonKeys({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

// Describes one tensor argument: a view of a value that the pass made, or a tensor that existed before the pass.
struct TensorRef {
  int32_t arg;
  int32_t element;  // the index in a list argument; -1: the argument is not a list
  int32_t value;    // the value that it views; -1: it existed before the pass, and `direct` is set
  at::Tensor direct;
  uint32_t version = 0;
  size_t storage_bytes = 0;
  c10::DimVector sizes, strides;
  int64_t offset = 0;
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  std::optional<uint64_t> checksum;  // hash of the elements that the operation read, if replays compare them
};

// Returns whether the tensor is a strided view of a storage, without a subclass, symbolic sizes or a lazy conversion.
bool is_plain(const at::Tensor& tensor);
bool covers_its_storage(const at::Tensor& tensor);

void describe(const at::Tensor& tensor, TensorRef& ref);
at::Tensor view_of(const at::Tensor& held, const TensorRef& ref);

// Return whether the memory of a tensor that existed before the pass was freed, or written in place, since then.
bool is_freed(const TensorRef& ref);
bool is_written(const TensorRef& ref);

// Returns a tensor that shares the memory and the version counter, but has no autograd metadata.
at::Tensor alias_of(const at::Tensor& tensor);
// Returns a one-dimensional view of the whole storage with elements of the given type.
at::Tensor flat_of(const at::Tensor& tensor, caffe2::TypeMeta dtype);
at::Tensor bytes_of(const at::Tensor& tensor);
at::Tensor copy_of(const at::Tensor& tensor);
uint64_t hash_of_storage(const at::Tensor& tensor);
// Returns a hash of the elements in view, excluding gaps between them; none for a tensor that is not on the CPU.
std::optional<uint64_t> hash_of_elements(const at::Tensor& tensor);
bool have_equal_storages(const at::Tensor& one, const at::Tensor& other);
bool is_all_zero(const at::Tensor& tensor);

}  // namespace drivetrain::budget
