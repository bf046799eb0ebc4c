// Adds the gradients of a window's parts in the order of a binary tree.
#include "ddp/part_sums.h"

#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "base/stream_order.h"

namespace drivetrain::ddp {
namespace {

// Keeps memory that another stream may own from reuse until the current stream has read it.
void read_here(const at::Tensor& grad) {
  if (const std::optional<c10::Stream> here = stream_on(grad.device())) record_use(grad.storage(), *here);
}

// Returns the gradient itself where nothing else refers to it or its memory, else a copy.
at::Tensor taken_over(const at::Tensor& grad) {
  read_here(grad);
  const bool is_held = grad.use_count() > 1 || grad.storage().use_count() > 1;
  return is_held ? grad.clone().detach() : grad.detach();
}

}  // namespace

bool PartSums::is_before_last() const {
  int64_t finished = 0;
  for (size_t level = 0; level < levels_.size(); ++level) {
    if (levels_[level].is_full()) finished += int64_t{1} << level;
  }
  return finished + 1 < num_parts_;
}

void PartSums::end_part(double weight) {
  Level sum;
  sum.weight = weight;
  for (const Parameter& param : params_) {
    at::Tensor& grad = param.tensor.mutable_grad();
    sum.grads.push_back(grad.defined() ? taken_over(grad) : at::zeros_like(param.tensor, param.grad_dtype));
    grad = at::Tensor();
  }
  size_t level = 0;
  for (; level < levels_.size() && levels_[level].is_full(); ++level) {
    for (size_t i = 0; i < params_.size(); ++i) {
      levels_[level].grads[i].add_(sum.grads[i]);
      sum.grads[i] = std::move(levels_[level].grads[i]);  // frees the other one before the next is added
    }
    sum.weight = levels_[level].weight + sum.weight;
    levels_[level] = {};
  }
  if (level == levels_.size()) levels_.emplace_back();
  levels_[level] = std::move(sum);
}

void PartSums::add_to(size_t param, const at::Tensor& grad) const {
  for (const Level& level : levels_) {
    if (!level.is_full()) continue;
    read_here(level.grads[param]);
    grad.add_(level.grads[param]);
  }
}

double PartSums::add_to(double weight) const {
  for (const Level& level : levels_) {
    if (level.is_full()) weight = level.weight + weight;
  }
  return weight;
}

}  // namespace drivetrain::ddp
