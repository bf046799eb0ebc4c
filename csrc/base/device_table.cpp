// Uploads tables to a device; see device_table.h.
#include "base/device_table.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "base/check.h"
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

c10::Stream stream_without_capture(const c10::impl::VirtualGuardImpl& impl, c10::Device device) {
  constexpr int kStreams = 64;  // more than the pool has
  for (int i = 0; i < kStreams; ++i) {
    const c10::Stream stream = impl.getStreamFromGlobalPool(device);
    if (!is_capturing(stream.native_handle())) return stream;
  }
  throw EnvironmentError(
      "no stream is free for the table of a captured step: all streams of torch's pool are captured.");
}

// Uploads outside of the running capture: torch's allocator gives a graph the memory of captured streams alone. Waits
// for the copy, which no replay is ordered after.
at::Tensor uploaded_outside_of_captures(const std::vector<char>& bytes, c10::Device device) {
  const OutsideCaptures outside;
  const c10::impl::VirtualGuardImpl impl(device.type());
  const c10::Stream stream = stream_without_capture(impl, device);
  const c10::StreamGuard guard(stream);
  at::Tensor on_device = uploaded(bytes, device);
  impl.synchronizeStream(stream);
  return on_device;
}

// Keeps the tables of graphs that have ended until the next capture. CUDA reports such an end on a thread of its own,
// which may call no CUDA function, as torch's allocator may do.
class EndedTables {
 public:
  static void take(void* table) noexcept;
  void free() {
    std::vector<std::unique_ptr<at::Tensor>> tables;
    const std::lock_guard lock(mutex_);
    tables.swap(tables_);
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<at::Tensor>> tables_;
};

// Never destroyed, because a graph may end after all other objects of the process.
EndedTables& ended_tables() {
  static auto* const tables = new EndedTables;
  return *tables;
}

void EndedTables::take(void* table) noexcept {
  std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(table));
  const std::lock_guard lock(ended_tables().mutex_);
  ended_tables().tables_.push_back(std::move(owned));
}

}  // namespace

at::Tensor table_of_launch(const std::vector<char>& bytes, c10::Device device, void* stream) {
  if (!is_capturing(stream)) return uploaded(bytes, device);
  const at::Tensor written =
      at::empty({static_cast<int64_t>(bytes.size())}, at::TensorOptions(at::kByte).device(device));
  write_cuda(written.data_ptr(), bytes.data(), bytes.size(), stream);
  return written;
}

char* DeviceTable::hold(const std::vector<char>& bytes, c10::Device device, void* stream) {
  if (is_capturing(stream)) {
    ended_tables().free();
    KeptForGraph table(new at::Tensor(uploaded_outside_of_captures(bytes, device)), &EndedTables::take);
    char* const begin = static_cast<char*>(static_cast<at::Tensor*>(table.get())->data_ptr());
    keep_for_graph(stream, std::move(table));
    return begin;
  }
  if (!is_held_for(stream) || bytes_ != bytes) {
    on_device_ = uploaded(bytes, device);  // The last step may still read the old memory.
    bytes_ = bytes;
    stream_ = stream;
  }
  return data();
}

bool DeviceTable::is_held_for(void* stream) const {
  // On another stream the copy may be unfinished, and its memory could be reused too early.
  return on_device_.defined() && stream_ == stream && !is_capturing(stream);
}

}  // namespace drivetrain
