// Declares the solver of activation budgets: which saved values of a recorded forward pass to save and which to
// recompute. Includes no torch header.
#pragma once

#include <cstdint>

#include "budget/solver/simulator.h"

namespace drivetrain::budget {

struct Solution {
  Policy policy;  // the one with the smallest peak if none fits the budget
  Outcome outcome;
  double bound_seconds = 0;  // a lower bound on the seconds of every policy that fits
  bool is_feasible = false;
  int64_t smallest_bytes = 0;  // the smallest peak found
};

// Searches the policy that takes the least seconds with a peak of at most `budget_bytes`.
Solution solve(const Trace& trace, int64_t budget_bytes);

}  // namespace drivetrain::budget
