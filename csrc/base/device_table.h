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

// Returns the bytes on the device, for one launch on this stream. A captured CUDA graph writes them itself, because its
// replays come after the memory is freed.
at::Tensor table_of_launch(const std::vector<char>& bytes, c10::Device device, void* stream);

// Uploads bytes through pinned memory only when they have changed, so that the host waits in captures alone. The table
// of a captured CUDA graph has memory of its own that lives as long as the graph. So replays neither copy it again nor
// read the uploads of later steps.
class DeviceTable {
 public:
  // Returns the copy on the device, for work on this stream.
  char* hold(const std::vector<char>& bytes, c10::Device device, void* stream);

  // Returns whether work on this stream may read the last copy, which begins at data().
  bool is_held_for(void* stream) const;
  char* data() const { return static_cast<char*>(on_device_.data_ptr()); }

 private:
  std::vector<char> bytes_;
  void* stream_ = nullptr;
  at::Tensor on_device_;
};

}  // namespace drivetrain
