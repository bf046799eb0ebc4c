// A bound on the seconds that knows what is there at a time during backward, not at the end of forward alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

struct BoundEffort {
  double enough_seconds;        // higher bounds are not looked for
  double price;                 // seconds per byte kept at the end of forward, about what the last ones are worth
  size_t num_choices = 8000;    // at a time; more are better and take longer
  int64_t num_steps = 600'000;  // from one choice to the next
};

// No keeping with a peak within the budget takes less seconds.
double bound_in_backward(const TraceIndex& index, int64_t budget_bytes, const BoundEffort& effort);

}  // namespace drivetrain::budget
