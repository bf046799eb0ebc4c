// Declares what a step measures of a parameter while it updates it. Needs no torch header.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"
#include "formats/storage.h"

namespace drivetrain::optim {

// The sums over a part of a parameter. They have the same bits for any number of threads. A pass leaves fields alone
// that another pass of the step writes.
struct ChunkStatistics {
  double grad = 0;     // squares of the gradient as it is in memory
  double largest = 0;  // magnitude among the gradient's finite elements
  int64_t not_finite = 0;
  double update = 0;  // squares of the change before it is rounded to the parameter's format
  double param = 0;   // squares of the value before the step
  // Elements that the rule changes, and those whose stored value stays as it was. Not counted where rounding loses
  // nothing on average, or nothing at all.
  int64_t changed = 0, lost = 0;
};

DT_BEGIN_ISA

// Returns whether storing values of a step in this format may lose changes. Stochastic rounding loses none on average,
// and masters of 32 bits lose none at all.
DT_HOST_DEVICE bool may_lose(Format format) {
  return format != Format::kFloat32 && format != Format::kFloat64 && format != Format::kBFloat16Stochastic &&
         format != Format::kFloat16Stochastic && format != Format::kBFloat16Remainder16 &&
         format != Format::kFloat16Master;
}

DT_END_ISA

}  // namespace drivetrain::optim
