// Declares the marks by which native code enters and leaves phases of the traced step. Needs no torch header.
#pragma once

#include <cstdint>

#include "trace/phases.h"

namespace drivetrain::trace {

bool is_on();
void begin(Phase phase);
void end(Phase phase);
void end_step(int64_t step);  // marks the end of a step, and of all its phases

// Adds its lifetime to the recomputation of the step. The host's time needs no records: a step may recompute thousands
// of tensors.
class RecomputationTally {
 public:
  RecomputationTally();
  ~RecomputationTally();
  RecomputationTally(const RecomputationTally&) = delete;
  RecomputationTally& operator=(const RecomputationTally&) = delete;

 private:
  int64_t begin_ns_ = 0;   // 0: the trace is off, or an outer tally counts
  bool has_span_ = false;  // a device's time is known for records only
};

}  // namespace drivetrain::trace
