// Declares the account of a step: every nanosecond between two step marks belongs to one phase. Needs no torch header.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "trace/ring.h"

namespace drivetrain::trace {

struct StepAccount {
  int64_t step = 0;
  int64_t begin_ns = 0;  // of the monotonic clock
  int64_t wall_ns = 0;
  std::array<int64_t, kNumPhases> phase_ns{};  // their sum is wall_ns
  int64_t num_forwards = 0;
  bool is_complete = true;  // false: the ring refused records, or they do not nest
};

// The phase of the training thread when it wrote its last record.
struct Standing {
  Phase phase = Phase::kHost;  // the innermost that is open
  int64_t since_ns = 0;        // of the monotonic clock; 0: no step has begun
  int64_t longest_ns = 0;      // the longest time between two records so far that belonged to this phase
};

// Turns records, in the order of the ring, into accounts. Time belongs to the innermost phase that is open.
//
// Time between two phases belongs to the later one where it prepares it. Time between a batch and the forward pass
// belongs to the copy, if a copy to a device is possible. Time between the backward pass and the optimizer step
// (clipping) belongs to the optimizer. Time between the forward and the backward pass (the loss) belongs to the forward
// pass. The rest belongs to the host.
class Accountant {
 public:
  explicit Accountant(bool sees_forwards) : sees_forwards_(sees_forwards) {}

  // Tells that batches are copied to a device before the forward pass.
  void expect_copies() { copies_batches_ = true; }

  // Returns an account if the record ends a step. `at_ns` is its time in the account, of the host or of a device, and
  // `num_refused` is the ring's count when the record was read.
  std::optional<StepAccount> take(const Record& record, int64_t at_ns, int64_t num_refused);

  Standing standing() const;

 private:
  void spend_until(int64_t time_ns);
  Phase phase_of_gap(Phase next) const;
  bool is_of_worker(const Record& record) const;
  void begin(const Record& record);
  void end(const Record& record);
  Phase innermost() const { return open_.empty() ? Phase::kHost : open_.back(); }

  bool copies_batches_ = false;
  bool sees_forwards_;
  std::vector<Phase> open_;
  std::optional<Phase> last_;  // the last outermost phase of the step that has ended
  int64_t gap_ns_ = 0;         // spent since then outside of all phases
  int64_t now_ns_ = 0;
  int64_t written_ns_ = 0;  // when the host wrote the last record
  int32_t thread_ = -1;     // the thread that marks steps
  bool has_begun_ = false;
  int64_t num_refused_ = 0;
  StepAccount account_;
  std::array<int64_t, kNumPhases> longest_ns_{};  // see Standing
};

}  // namespace drivetrain::trace
