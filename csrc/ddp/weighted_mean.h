// Declares the weights of a step's gradients, and the weighted mean.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "base/transfer.h"
#include "ddp/grad_buffer.h"
#include "ddp/parameter.h"
#include "ddp/part_sums.h"
#include "ddp/side_sum.h"

namespace drivetrain::ddp {

class BucketQueue;

// A check that a device makes and whose result the host learns in a later step, without waiting.
class LateCheck {
 public:
  // found: float64 [1] on a device, above 0 where something is wrong.
  void add(const at::Tensor& found) {
    found_ = found_.defined() ? found_.add(found) : found;
    is_sent_ = false;
    send();
  }

  // Returns true once if the host has learned of a failure.
  bool has_failed() {
    if (!heard_ || !heard_->has_come()) return false;
    const bool failed = heard_->value().data_ptr<double>()[0] > 0;
    heard_.reset();
    if (failed) found_ = at::Tensor();
    send();
    return failed;
  }

 private:
  // Sends one value at a time. Values found meanwhile go with the next one.
  void send() {
    if (is_sent_ || heard_ || !found_.defined()) return;
    heard_.emplace(found_);
    is_sent_ = true;
  }

  at::Tensor found_;  // the sum of all findings
  bool is_sent_ = false;
  std::optional<LateValue> heard_;
};

// The gradients of weighted backwards become the sum over ranks divided by the sum of weights, not by the number of
// ranks.
//
// Invariants: has_weight() holds while `.grad` may hold gradients that weights count. The host waits for no device: an
// error that only a device can find is raised in a later step.
class WeightedMean : public SideSum {
 public:
  // forget_step: abandons the step, before an error.
  WeightedMean(const Parameters& params, const PartSums& part_sums, Collectives& collectives,
               std::function<void()> forget_step);

  // The ranks' contributions to a step, for an owner that keeps this rank's part of sums over several steps. These are
  // the sum of weights, and the number of ranks with `holds`; on a device both as float64 [2].
  using Total = std::variant<std::pair<double, double>, at::Tensor>;
  using Holds = std::variant<bool, at::Tensor>;  // float64 [1], 0 or 1, where only the parameters' device knows
  // Leaves sums as they are, and the check that weights count all gradients to the owner.
  void leave_to_owner() { has_owner_ = true; }
  // Returns the ranks' contributions to the last step, after leave_to_owner(); zeros if it has not ended.
  const Total& total() const { return total_; }
  // Begins a backward whose loss was multiplied with this weight. Throws if `.grad` holds gradients that no weight
  // counts; on a device other than the CPU in a later call. holds: the owner's parts of gradients are not all zero.
  void begin(double weight, const Holds& holds);
  // Takes the owner's finding on a device, for check_late(). found: float64 [1], above 0 where a weighted backward
  // added to gradients that no weight counts (by_weighted), or another one to those that weights count.
  void note_found(const at::Tensor& found, bool by_weighted) { (by_weighted ? uncounted_ : unzeroed_).add(found); }
  // Ends it. failed: it raised, and its weights count nothing.
  void end(bool failed);
  // Notes the gradients that the weights count, after the backward and its reduction.
  void note_gradients();
  // Returns true if no step has ended since begin().
  bool is_in_step_of_begin() const { return begun_in_ == collectives_.steps(); }
  // Returns the sum of this rank's weights, and forgets them. Throws if there is none, as after a reduction.
  double take();
  // Counts this rank with weight 0 if it has none.
  void count_nothing() { weight_ = weight_.value_or(0); }
  bool has_weight() const { return weight_.has_value(); }
  // Returns this rank's weight in a step that divides by the sum of weights, if the host knows it.
  std::optional<double> of_rank() const {
    if (!weight_ || has_owner_ || kept_weight_.defined()) return std::nullopt;
    return part_sums_.add_to(*weight_);
  }
  bool is_due() const override { return has_weight(); }
  // Throws if a backward without a weight adds to gradients that weights count. Gradients that were zeroed since are
  // forgotten instead. came: the parameter whose gradient has just come, the backward's first.
  void check_gradient(size_t came) {
    if (weight_ && !is_weighted_) check_unweighted(came);
  }
  // Throws the error that a device has found in an earlier backward, once the host knows it.
  void check_late();

  // ---- A step's reduction.

  void begin_step(BackwardKind kind, bool is_joining) override;
  // Divides the sums in the buffer by the sum of all weights, except where the transport has. factor: the number by
  // which a communication hook has divided, else 1. Throws if some ranks ran a prepared backward and others an
  // unprepared one; on a device other than the CPU in a later call.
  void divide(const BucketQueue& queue, GradBuffer& buffer, double factor);
  void end_step() override { forget_weights(); }

 private:
  void forget_weights();
  at::Tensor values() override { return sum_; }
  [[noreturn]] void fail_parted(double prepared, double unprepared);
  // Identifies the tensor that is `.grad` and every write to it that autograd would notice.
  using Seen = std::pair<const void*, uint32_t>;
  static Seen see_grad(const Parameter& param);

  void forget_zeroed_weights();
  at::Tensor any_nonzero(const std::vector<at::Tensor>& grads) const;
  void check_unweighted(size_t came);
  bool were_zeroed(size_t came);

  const Parameters& params_;
  const PartSums& part_sums_;
  const std::function<void()> forget_step_;
  bool has_owner_ = false;
  Holds holds_ = false;  // this rank's word for total_
  Total total_;
  bool is_weighted_ = false;      // the current backward has a weight
  int64_t begun_in_ = 0;          // finished steps at begin()
  std::optional<double> weight_;  // the sum of this rank's weights
  at::Tensor kept_weight_;        // float64 [1]; weights of gradients that only the device knows to be zeroed: then 0
  LateCheck uncounted_;           // gradients that a weighted backward added to and no weight counts
  LateCheck unzeroed_;            // gradients with weights that a backward without one added to
  std::vector<Seen> seen_;        // by parameter: `.grad` after the last weighted backward
  LateCheck parted_;              // kinds of backwards that differ between ranks
  // float64 [4], on the parameters' device, summed over ranks: weights, ranks of kPrepared, ranks of kUnprepared, ranks
  // with `holds`.
  at::Tensor sum_;
};

// Multiplies in place by a factor that only the device knows: float64 [1]. Gives the bits of a factor on the host.
void scale_by(const at::Tensor& values, const at::Tensor& factor);

}  // namespace drivetrain::ddp
