// Declares how a rank takes part in the steps of others: after it has run out of inputs, or together with such a rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

struct ReducerParts;

// Invariant: a rank without inputs starts the same collectives in the same order as the others. Its own `.grad` become
// the others' mean where they are views of the buffer, as in torch.
class UnevenInputs {
 public:
  explicit UnevenInputs(ReducerParts& parts) : parts_(parts) {}

  // Tells that ranks may run out of inputs in the next step. divisor: divides the sum instead of the number of ranks;
  // 0: the number of ranks.
  void set_joining(int64_t divisor);
  bool is_joining() const { return is_joining_; }
  int64_t divisor() const { return divisor_; }
  void end_step();

  // ---- For a rank without inputs, in the order of calls.

  // Takes part in the planning of buckets, where the others' backward begins.
  void shadow_planning();
  // Adds zeros to the reduction of a bucket. as_sum: the others divide by another number than all ranks'.
  std::unique_ptr<PendingReduce> reduce_zeros(size_t bucket, bool as_sum);
  void wait_for_zeros(size_t bucket, PendingReduce& reduce);
  // Takes part in the sum of the maps of used parameters, where there is one.
  void shadow_used_map();
  void count_shadowed_step();
  void reset() { kept_.clear(); }

 private:
  ReducerParts& parts_;
  bool is_joining_ = false;
  int64_t divisor_ = 0;
  // By bucket: copies of values that `.grad` shows while this rank reduces zeros in their memory. Undefined where
  // nothing shows them, and absent behind the last bucket that has some.
  std::vector<at::Tensor> kept_;
};

}  // namespace drivetrain::ddp
