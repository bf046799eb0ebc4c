// Which activations to keep between forward and backward so that the memory fits and the least time goes into replays:
// pure functions of a recorded forward pass. Needs no torch header.
#pragma once

#include <cstdint>
#include <vector>

namespace drivetrain::budget {

// A way of keeping a value: what stays resident, and what storing it and bringing it back adds to the step.
struct KeptForm {
  int64_t bytes;
  double seconds;
};

// A storage in one version.
struct TraceValue {
  int64_t bytes = 0;            // as it is
  bool can_keep = true;         // false: its memory is written over later, in place
  bool can_forget = true;       // false: nobody can replay its op, so it is kept where it is needed
  int32_t replaces = -1;        // written in place over this value: takes over its memory
  std::vector<KeptForm> forms;  // further ways of keeping it besides as it is, for no time: packed, offloaded
};

struct TraceOp {
  double seconds = 0;
  std::vector<int32_t> reads, writes;
};

// Autograd takes a saved value, or gives it back. Every saved tensor is given back once, and a value that is taken is
// given back later. Values that are only given back happen, too.
struct TraceUse {
  int32_t value;
  bool is_release;
};

// What no op writes is external: always there, and costs nothing.
struct Trace {
  std::vector<TraceValue> values;
  std::vector<TraceOp> ops;    // in order of forward
  std::vector<TraceUse> uses;  // in order of backward
};

constexpr int8_t kForget = -1;        // else 0: as it is, 1 + i: in forms[i]
using Keeping = std::vector<int8_t>;  // per value; what is said of values that nobody needs does not matter

struct Outcome {
  int64_t peak_bytes = 0;     // the most that is there at a time, from the end of forward on
  double seconds = 0;         // of replayed ops and of forms
  int64_t forward_bytes = 0;  // at the end of forward
};

// What a step does that keeps these values. A value is needed while backward has still to release it, and while an op
// reads it that has not been replayed and whose forgotten outputs are needed. What is needed and kept is there after
// forward. Taking a forgotten value replays its op, and before that whatever the op reads and is not there; taking one
// that is kept in a form brings it back. Then it stays until nobody needs it. While an op is replayed its reads and all
// of its outputs are there (those that were there already, twice, unless one takes over the memory of what it
// replaces); while a value is brought back, its form is there, too.
Outcome simulate(const Trace& trace, const Keeping& keeping);

struct Solution {
  Keeping keeping;  // where nothing fits: the one with the smallest peak
  Outcome outcome;
  double bound_seconds = 0;  // no keeping that fits takes less
  bool is_feasible = false;
  int64_t smallest_bytes = 0;  // the smallest peak that was found
};

// The parts of the solver that an ablation can leave out.
struct SolverParts {
  bool min_cut = true;  // Without it, menus of segments hold enumerated keepings only.
  bool segments = true;
  bool segments_anywhere = true;  // Besides those in valleys, where the trace has few ops.
  bool local_search = true;
};

// Finds a keeping with a peak of at most `budget_bytes` that takes the least seconds.
Solution solve(const Trace& trace, int64_t budget_bytes, const SolverParts& parts = {});

}  // namespace drivetrain::budget
