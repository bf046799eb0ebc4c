// Implements transfer.h with pinned memory, which a device reads and writes without blocking the host.
#include "base/transfer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "base/check.h"
#include "base/stream_order.h"

namespace drivetrain {
namespace {

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).pinned_memory(true));
}

}  // namespace

at::Tensor copied_to(const at::Tensor& on_host, c10::Device device) {
  if (device.is_cpu()) return at::empty_like(on_host).copy_(on_host);  // a user's dispatch mode may reject clone()
  // torch's pinned allocator does not reuse a block while a copy still reads it.
  return pinned_like(on_host).copy_(on_host).to(device, /*non_blocking=*/true);
}

LateValue::LateValue(const at::Tensor& on_device) : on_host_(pinned_like(on_device)), event_(on_device.device()) {
  on_host_.copy_(on_device, /*non_blocking=*/true);
  event_.record(*stream_on(on_device.device()));
}

const at::Tensor& LateValue::value() const {
  DT_INVARIANT(has_come());
  return on_host_;
}

}  // namespace drivetrain
