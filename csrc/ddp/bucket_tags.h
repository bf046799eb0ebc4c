// Declares the tags that travel behind a bucket's values where the transport itself compares none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

// Every rank writes the number of its step and bucket into its own region of a bucket's tags and zeros elsewhere. The
// sum over ranks keeps the digits, so that a rank sees what the others reduced before it uses the values.
//
// Invariant: a digit is below 128, so that every floating type, and the mean over ranks, represents it.
class BucketTags {
 public:
  // Prepares tags for that transport. Transport::allocate() may change whether it wants tags, so call this before.
  void prepare(const Comm& comm);
  // Returns the number of elements per bucket.
  int64_t numel() const { return digits_.numel(); }
  // Returns the aligned bytes that tags add to a bucket; 0 where it has none. Only buckets on the CPU have tags:
  // elsewhere the host would have to wait for the values.
  int64_t bytes(const at::Tensor& param, at::ScalarType grad_dtype, bool sparse) const;
  void write(const at::Tensor& tags, int64_t step, size_t bucket);
  // Returns how another rank's tag differs from this rank's; "" if all agree. factor: the number of ranks where the
  // transport left the mean, else 1.
  std::string difference(const at::Tensor& tags, int64_t step, size_t bucket, float factor, const Comm& comm) const;

 private:
  static constexpr int64_t kDigits = 4;  // per rank: three of the step, one of the bucket

  bool are_wanted_ = true;
  int rank_ = 0;
  at::Tensor digits_;  // float32 [ranks * kDigits]; zero outside this rank's region
};

}  // namespace drivetrain::ddp
