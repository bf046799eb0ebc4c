// Declares the checksum of parameters by which ranks compare their replicas.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ddp/parameter.h"
#include "ddp/side_sum.h"

namespace drivetrain::ddp {

// Returns a checksum of 64 bits over the tensors' values in order: int64 [], on the first tensor's device. On the CPU
// every bit counts. Elsewhere the sum of the values' bit patterns counts, so that an exchange of two values within one
// tensor goes unseen. The host waits for no device.
at::Tensor hash_of(const std::vector<at::Tensor>& tensors);

// Compares the parameters over ranks every so many synchronized steps.
//
// Invariant: compares the parameters' values from the beginning of backward, before an optimizer steps in backward.
class ReplicaCheck : public SideSum {
 public:
  // every: synchronized steps between two comparisons; 0: never.
  ReplicaCheck(const Parameters& params, Collectives& collectives, int64_t every)
      : SideSum(collectives, Purpose::kReplicas, "the replicas' checksums"), params_(params), every_(every) {}
  // Computes this rank's checksum if a comparison is due.
  void begin_step(BackwardKind kind, bool is_joining) override;
  // Returns true if this step compares.
  bool is_due() const override { return hashes_.defined(); }
  // Throws after the step if the checksums differ, and names the first parameter that differs. position: as for wait().
  void compare(int64_t position);

 private:
  at::Tensor values() override { return hashes_; }

  const Parameters& params_;
  const int64_t every_;
  at::Tensor hashes_;  // int64 [ranks], summed over ranks; undefined where nothing is compared
};

}  // namespace drivetrain::ddp
