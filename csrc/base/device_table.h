// Bytes that kernels read, kept on their device between steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <type_traits>
#include <vector>

namespace drivetrain {

// Table by table, each aligned.
template <class T>
void append_bytes(std::vector<char>& bytes, const T* values, size_t count) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  const char* begin = reinterpret_cast<const char*>(values);
  bytes.insert(bytes.end(), begin, begin + count * sizeof(T));
}

// Uploaded again only where they have changed, through pinned memory: the host never waits. While a CUDA graph is
// captured they go into memory of their own, written by the graph itself and kept as long as this object lives:
// replays neither read what later steps upload nor write where those read.
class DeviceTable {
 public:
  // The copy on the device, for work that is enqueued on this stream of it.
  char* hold(const std::vector<char>& bytes, c10::Device device, void* stream);

 private:
  std::vector<char> bytes_;
  void* stream_ = nullptr;
  at::Tensor on_device_;
  std::vector<at::Tensor> captured_;
};

}  // namespace drivetrain
