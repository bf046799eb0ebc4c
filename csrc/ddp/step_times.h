// Declares the times of a synchronized step.
#pragma once

#include <cstdint>

namespace drivetrain::ddp {

// Nanoseconds of the monotonic clock; 0: has not happened.
struct StepTimes {
  int64_t forward_start = 0;
  int64_t backward_start = 0;  // the first gradient came
  int64_t backward_end = 0;    // the last gradient came
  int64_t comm_start = 0;      // the first bucket started
  int64_t comm_end = 0;        // the last bucket was reduced
  int64_t buckets_reduced = 0;
  int64_t exposed = 0;  // duration for which backward waited in or for a transport or a communication hook
};

}  // namespace drivetrain::ddp
