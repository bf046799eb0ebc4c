// Implements the sums over hosts of the transport through shared memory.
#include "ddp/transport/shm/host_link.h"

#include <ATen/ops/from_blob.h>

namespace drivetrain::ddp {
namespace {

at::ScalarType scalar_type(ElementType type) {
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt}) {
    if (element_type(dtype) == type) return dtype;
  }
  return at::kLong;
}

}  // namespace

void TorchLink::start(char* values, ElementType type, int64_t numel, const std::shared_ptr<const RankRanges>& ranges) {
  const auto keep = [owner = owner_of_(values)](void*) {};
  const at::Tensor sum = at::from_blob(values, {numel}, keep, at::dtype(scalar_type(type)));
  started_.push_back(ranges ? leaders_->start_scatter(sum, ranges) : leaders_->start_sum(sum));
}

bool TorchLink::finish_oldest() {
  if (!started_.front()->is_done()) return false;
  started_.front()->wait();
  started_.pop_front();
  return true;
}

void MeanOfSum::wait() {
  sum_->wait();
  flat_.div_(size_);
}

bool MeanOfSum::wait_for(std::chrono::milliseconds limit) {
  if (!sum_->wait_for(limit)) return false;
  wait();
  return true;
}

}  // namespace drivetrain::ddp
