// Local improvement of a keeping: what is replayed although it would fit is kept.
#pragma once

#include <cstdint>

#include "activation/simulator.h"
#include "activation/trace_index.h"

namespace drivetrain::activation {

// Keeps outputs of replayed ops where there is room until they would be replayed, those first that save most seconds per
// byte. The keeping must fit into the budget, and does so afterwards. Returns its outcome.
Outcome fill(const TraceIndex& index, Simulator& simulator, int64_t budget_bytes, Keeping& keeping);

}  // namespace drivetrain::activation
