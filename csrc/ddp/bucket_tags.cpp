// Writes and compares the tags of buckets.
#include "ddp/bucket_tags.h"

#include <ATen/ops/zeros.h>

#include <cmath>

#include "base/check.h"
#include "ddp/bucket_plan.h"

namespace drivetrain::ddp {
namespace {

constexpr int kDigitBits = 7;  // all that a 16-bit floating type is sure to carry
constexpr uint64_t kDigit = (uint64_t{1} << kDigitBits) - 1;

}  // namespace

void BucketTags::prepare(const Comm& comm) {
  are_wanted_ = comm.wants_tags() && comm.size() > 1;
  rank_ = comm.rank();
  digits_ = at::zeros({kDigits * comm.size()}, at::kFloat);
}

int64_t BucketTags::bytes(const at::Tensor& param, at::ScalarType grad_dtype, bool sparse) const {
  if (sparse || !param.is_cpu() || !at::isFloatingType(grad_dtype) || at::isFloat8Type(grad_dtype)) return 0;
  if (!are_wanted_) return 0;
  const int64_t bytes = numel() * static_cast<int64_t>(c10::elementSize(grad_dtype));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void BucketTags::write(const at::Tensor& tags, int64_t step, size_t bucket) {
  uint64_t rest = static_cast<uint64_t>(step);
  float* const digits = digits_.data_ptr<float>() + rank_ * kDigits;
  for (int64_t i = 0; i < kDigits - 1; ++i, rest >>= kDigitBits) digits[i] = static_cast<float>(rest & kDigit);
  digits[kDigits - 1] = static_cast<float>(bucket & kDigit);
  tags.copy_(digits_);
}

std::string BucketTags::difference(const at::Tensor& tags, int64_t step, size_t bucket, float factor,
                                   const Comm& comm) const {
  const at::Tensor came = tags.to(at::kFloat);
  const float* const digits = came.data_ptr<float>();
  const float* const mine = digits_.data_ptr<float>() + rank_ * kDigits;
  const float index = static_cast<float>(bucket & kDigit);
  for (int rank = 0; rank < comm.size(); ++rank) {
    const float* const theirs = digits + rank * kDigits;
    bool is_same = std::round(theirs[kDigits - 1] * factor) == index;
    uint64_t their_step = 0;
    for (int64_t i = kDigits - 2; i >= 0; --i) {
      const float digit = std::round(theirs[i] * factor);
      is_same &= digit == mine[i];
      their_step = their_step << kDigitBits | (digit >= 0 && digit <= kDigit ? static_cast<uint64_t>(digit) : 0);
    }
    if (is_same) continue;
    return text("the ranks reduce different things: ", comm.ranks().name(comm.rank()), " bucket ", bucket,
                " in synchronized step ", step, ", ", comm.ranks().name(rank),
                " something else, which looks like bucket ", std::round(theirs[kDigits - 1] * factor), " in step ",
                their_step,
                ". They have taken different ways through the script: another number of backwards, another model");
  }
  return "";
}

}  // namespace drivetrain::ddp
