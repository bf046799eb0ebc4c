// Declares the queue of a step's buckets: it starts their reductions in plan order, awaits them and hands them over.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/grad_buffer.h"
#include "ddp/gradient_check.h"
#include "ddp/gradient_noise.h"
#include "ddp/parameter.h"
#include "ddp/part_sums.h"
#include "ddp/step_gradients.h"
#include "ddp/step_streams.h"
#include "ddp/transport/comm_hook.h"
#include "ddp/used_parameters.h"

namespace drivetrain::ddp {

// Says how a step's gradients become means.
struct Scaling {
  double before = 1;             // factor for dense gradients on the way into the buffer
  double before_sparse = 1;      // factor for sparse gradients
  bool as_sum = true;            // the transport leaves the sum of dense gradients, else their mean
  bool takes_all = false;        // also buckets without used parameters, as a rank of weight 0 uses none
  std::optional<double> weight;  // of this rank, where the transport may divide their sum by the sum of weights
  Purpose purpose = Purpose::kBucket;
};

// Invariant: every rank starts the same buckets in the same order, whatever the order in which its gradients come.
class BucketQueue {
 public:
  // Receives the parameters of each bucket, by index, once their `.grad` are final, and if the bucket is the last. It
  // may take `.grad` away.
  using OnReduced = std::function<void(const std::vector<size_t>& params, bool is_last)>;

  struct Parts {
    const Parameters& params;
    GradBuffer& buffer;
    StepGradients& gradients;
    const PartSums& part_sums;
    StepStreams& streams;
    Collectives& collectives;
    const UsedParameters& used;
    GradientCheck& check;
    GradientNoise& noise;
    StepTimes& times;
    bool skips_unused;  // does not reduce buckets whose parameters are all unused
  };
  explicit BucketQueue(const Parts& parts) : parts_(parts) {}

  // Gives every bucket to a hook instead of the transport. Throws if there is a hook already.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  bool has_hook() const { return hook_ != nullptr; }
  void set_on_reduced(OnReduced on_reduced) { on_reduced_ = std::move(on_reduced); }
  bool has_on_reduced() const { return static_cast<bool>(on_reduced_); }

  // ---- A step, in the order of calls.

  void reset();
  // To be set before the first add().
  Scaling& scaling() { return scaling_; }
  // Returns true if the transport divides the bucket's sum by the sum of weights.
  bool is_divided(size_t bucket) const { return states_[bucket].is_divided; }
  // Returns true while the bucket waits for gradients.
  bool is_filling(size_t bucket) const { return states_[bucket].phase == Phase::kFilling; }
  // Counts one parameter of its bucket as ready, and puts its gradient in.
  void add(size_t param);
  // Starts the full buckets that are next in plan order. Returns true if this call started the last bucket.
  bool start_full();
  bool have_all_started() const { return next_ == states_.size(); }
  void start(size_t bucket);
  // Hands over, in order, the buckets that are reduced by now, where that is allowed so early.
  void hand_over_reduced() { hand_over_reduced(0); }
  // Waits for the buckets that are not handed over.
  void wait_for_rest();
  // Copies the results of communication hooks to the place where the transport would have left them.
  void take_hook_results();
  // Returns true if the parameter's bucket was handed over during backward.
  bool was_handed_over(size_t param) const { return parts_.buffer.region(param).bucket < next_to_hand_over_; }
  void hand_over_rest();
  // Returns the error that on_reduced threw in this step. It is raised once backward has reduced everything, as other
  // ranks wait for that.
  std::exception_ptr take_hand_over_error() { return std::exchange(hand_over_error_, nullptr); }

  // Returns true if this rank uses no parameter of the bucket and such buckets are not reduced.
  bool is_skipped(size_t bucket) const;
  // Returns true if a reduced bucket is final. Else that is known at the end of backward only.
  bool can_hand_over_early() const;
  // label and position name the wait in reports.
  void wait_for(size_t bucket, PendingReduce& reduce);
  std::unique_ptr<PendingReduce> take_pending(size_t bucket) { return std::move(states_[bucket].reduce); }
  // Waits for the collectives in progress in a step that is given up. Another failure then says nothing new.
  void drain() const;
  // Returns the position of a rank that has started all buckets.
  int64_t last_position() const { return Progress::after_bucket(states_.size() - 1); }

 private:
  enum class Phase {
    kFilling,   // waits for gradients
    kFull,      // has all gradients, waits for the buckets before it to start
    kReducing,  // has started
  };
  struct State {
    size_t missing = 0;  // gradients
    Phase phase = Phase::kFilling;
    std::unique_ptr<PendingReduce> reduce;  // null: nothing to wait for
    HookReduce* hooked = nullptr;           // `reduce`, where a hook reduces
    bool is_divided = false;                // by the sum of weights
  };

  void put_in(size_t param);
  void compare_changes(size_t bucket);
  void reduce(size_t bucket);
  void take_hook_result(size_t bucket);
  void make_room_for(size_t bucket);
  void hand_over_reduced(size_t waits_for);
  void hand_over_next();

  const Parts parts_;
  std::unique_ptr<c10d::CommHookInterface> hook_;
  OnReduced on_reduced_;
  Scaling scaling_;
  std::vector<State> states_;     // by bucket
  size_t next_ = 0;               // the first bucket that has not started
  size_t next_to_hand_over_ = 0;  // the first bucket that on_reduced_ has not received
  std::exception_ptr hand_over_error_;
};

// Waits for a reduction without throwing; a failure is a warning.
void drain(PendingReduce* reduce);

}  // namespace drivetrain::ddp
