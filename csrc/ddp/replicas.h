// Declares the checksum of parameters by which ranks compare their replicas.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/parameter.h"

namespace drivetrain::ddp {

// Returns a checksum of 64 bits over the tensors' values in order: int64 [], on the first tensor's device. On the CPU
// every bit counts. Elsewhere the sum of the values' bit patterns counts, so that an exchange of two values within one
// tensor goes unseen. The host waits for no device.
at::Tensor hash_of(const std::vector<at::Tensor>& tensors);

// Compares the parameters over ranks every so many synchronized steps.
//
// Invariant: compares the parameters' values from the beginning of backward, before an optimizer steps in backward.
class ReplicaCheck {
 public:
  // every: synchronized steps between two comparisons; 0: never.
  ReplicaCheck(const Parameters& params, Collectives& collectives, int64_t every)
      : params_(params), collectives_(collectives), every_(every) {}
  // Computes this rank's checksum if a comparison is due. Ranks compare nothing while some have run out of inputs.
  void begin_step(bool is_joining);
  // Returns true if this step compares.
  bool is_due() const { return hashes_.defined(); }
  void start();
  PendingReduce* pending() const { return reduce_.get(); }
  void wait(int64_t position);
  // Throws after the step if the checksums differ, and names the first parameter that differs. position: as for wait().
  void compare(int64_t position);
  void reset() { reduce_.reset(); }

 private:
  const Parameters& params_;
  Collectives& collectives_;
  const int64_t every_;
  at::Tensor hashes_;  // int64 [ranks], summed over ranks; undefined where nothing is compared
  std::unique_ptr<PendingReduce> reduce_;
};

}  // namespace drivetrain::ddp
