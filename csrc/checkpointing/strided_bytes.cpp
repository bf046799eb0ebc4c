// Copies elements of a strided array, row by row.
#include "checkpointing/strided_bytes.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace drivetrain::checkpointing {
namespace {

template <int64_t kBytes>
void copy_items(unsigned char* to, const unsigned char* from, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * kBytes, from + i * stride, kBytes);
}

void copy_row(unsigned char* to, const unsigned char* from, int64_t item_bytes, int64_t stride, int64_t count) {
  if (stride == item_bytes) {
    std::memcpy(to, from, count * item_bytes);
    return;
  }
  switch (item_bytes) {
    case 1:
      return copy_items<1>(to, from, stride, count);
    case 2:
      return copy_items<2>(to, from, stride, count);
    case 4:
      return copy_items<4>(to, from, stride, count);
    case 8:
      return copy_items<8>(to, from, stride, count);
    default:
      DT_INVARIANT(item_bytes == 16);
      return copy_items<16>(to, from, stride, count);
  }
}

}  // namespace

StridedBytes::StridedBytes(const void* first, int64_t item_bytes, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& strides)
    : first_(static_cast<const unsigned char*>(first)), item_bytes_(item_bytes), size_(item_bytes) {
  DT_INVARIANT(sizes.size() == strides.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    size_ *= sizes[i];
    if (sizes[i] == 1) continue;
    if (!dims_.empty() && dims_.back().stride == sizes[i] * strides[i]) {
      dims_.back() = {dims_.back().size * sizes[i], strides[i]};
    } else {
      dims_.push_back({sizes[i], strides[i]});
    }
  }
}

void StridedBytes::copy(void* to, int64_t begin, int64_t end) const {
  if (begin >= end) return;
  auto* target = static_cast<unsigned char*>(to);
  if (is_contiguous()) {
    std::memcpy(target, first_ + begin, end - begin);
    return;
  }
  DT_INVARIANT(begin % item_bytes_ == 0 && end % item_bytes_ == 0);
  std::vector<int64_t> index(dims_.size());
  int64_t left = begin / item_bytes_;
  const unsigned char* row = first_;  // the row of the current element, at its beginning
  for (size_t i = dims_.size(); i-- > 0;) {
    index[i] = left % dims_[i].size;
    left /= dims_[i].size;
    if (i + 1 < dims_.size()) row += index[i] * dims_[i].stride;
  }
  const Dim& inner = dims_.back();
  for (int64_t count = (end - begin) / item_bytes_; count > 0;) {
    const int64_t in_row = std::min(count, inner.size - index.back());
    copy_row(target, row + index.back() * inner.stride, item_bytes_, inner.stride, in_row);
    target += in_row * item_bytes_;
    count -= in_row;
    index.back() = 0;
    for (size_t i = dims_.size() - 1; i-- > 0;) {
      row += dims_[i].stride;
      if (++index[i] < dims_[i].size) break;
      row -= index[i] * dims_[i].stride;
      index[i] = 0;
    }
  }
}

}  // namespace drivetrain::checkpointing
