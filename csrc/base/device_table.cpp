// Uploads tables to a device; see device_table.h.
#include "base/device_table.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "base/write_cuda.h"

namespace drivetrain {
namespace {

// Uploads in the order of the device's current stream.
at::Tensor uploaded(const std::vector<char>& bytes, c10::Device device) {
  // Pinned, so that the copy does not wait for the device; torch's allocator reuses the memory only after it.
  const auto size = static_cast<int64_t>(bytes.size());
  const at::Tensor pinned = at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(true));
  std::memcpy(pinned.data_ptr(), bytes.data(), bytes.size());
  return pinned.to(device, /*non_blocking=*/true);
}

}  // namespace

char* DeviceTable::hold(const std::vector<char>& bytes, c10::Device device, void* stream) {
  const auto size = static_cast<int64_t>(bytes.size());
  if (is_capturing(stream)) {
    captured_.push_back(at::empty({size}, at::TensorOptions(at::kByte).device(device)));
    write_cuda(captured_.back().data_ptr(), bytes.data(), bytes.size(), stream);
    return static_cast<char*>(captured_.back().data_ptr());
  }
  // On another stream the copy may be unfinished, and its memory could be reused too early.
  if (!on_device_.defined() || stream_ != stream || bytes_ != bytes) {
    on_device_ = uploaded(bytes, device);  // The last step may still read the old memory.
    bytes_ = bytes;
    stream_ = stream;
  }
  return static_cast<char*>(on_device_.data_ptr());
}

}  // namespace drivetrain
