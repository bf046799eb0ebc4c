// Keeps tables of bytes that kernels read on their device between steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <type_traits>
#include <vector>

namespace drivetrain {

// Appends a table to the bytes.
template <class T>
void append_bytes(std::vector<char>& bytes, const T* values, size_t count) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  const char* begin = reinterpret_cast<const char*>(values);
  bytes.insert(bytes.end(), begin, begin + count * sizeof(T));
}

// Uploads bytes through pinned memory only when they have changed, so that the host never waits. A captured CUDA graph
// writes its bytes itself, into memory that lives as long as this object. So replays neither read the uploads of later
// steps nor overwrite bytes that later steps read.
class DeviceTable {
 public:
  // Returns the copy on the device, for work on this stream.
  char* hold(const std::vector<char>& bytes, c10::Device device, void* stream);

 private:
  std::vector<char> bytes_;
  void* stream_ = nullptr;
  at::Tensor on_device_;
  std::vector<at::Tensor> captured_;
};

}  // namespace drivetrain
