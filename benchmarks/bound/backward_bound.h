// Declares the lower bound on the added seconds of activation budgets that judges the solver.
#pragma once

#include <cstddef>
#include <cstdint>

#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

struct BoundEffort {
  double enough_seconds;        // higher bounds are not searched
  double price;                 // seconds per byte saved at the end of forward, near the value of the last bytes saved
  size_t num_states = 8000;     // at a time; more states give higher bounds and take longer
  int64_t num_steps = 600'000;  // transitions between states
};

// Returns a lower bound on the seconds of every policy with a peak within the budget. Unlike the bound of a minimum
// cut, it counts memory at many times during backward.
double bound_in_backward(const TraceIndex& index, int64_t budget_bytes, const BoundEffort& effort);

}  // namespace drivetrain::budget
