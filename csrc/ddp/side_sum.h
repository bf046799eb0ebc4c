// Declares a sum over ranks that a step makes in addition to the sums of its buckets.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ddp/collectives.h"

namespace drivetrain::ddp {

// The forward to which a step's backward belongs.
enum class BackwardKind {
  kPrepared,    // a forward that prepared it
  kUnprepared,  // the outputs of a forward that did not: a second backward, or one whose forward ran under no_sync()
  kAny          // either: a rank of weight 0 runs none, and a weighted loss may have come from elsewhere
};

// A small tensor, such as a checksum. Its sum starts once the step's last bucket has started.
class SideSum {
 public:
  // what: the collective's name in errors and reports.
  SideSum(Collectives& collectives, Purpose purpose, std::string what)
      : collectives_(collectives), purpose_(purpose), what_(std::make_shared<const std::string>(std::move(what))) {}
  virtual ~SideSum() = default;
  SideSum(const SideSum&) = delete;
  SideSum& operator=(const SideSum&) = delete;

  Purpose purpose() const { return purpose_; }
  // Begins a step. is_joining: ranks may have run out of inputs, and then check nothing.
  virtual void begin_step(BackwardKind /*kind*/, bool /*is_joining*/) {}
  // Returns true if the current step makes this sum, the same on every rank.
  virtual bool is_due() const = 0;
  void start() {
    if (is_due()) reduce_ = collectives_.start_sum(values(), purpose_, *what_);
  }
  // Returns the sum in progress, or null.
  PendingReduce* pending() const { return reduce_.get(); }
  // position: the place in the step where ranks have started the sum.
  void wait(int64_t position) {
    if (reduce_) collectives_.wait(*reduce_, what_, position);
  }
  // Forgets the step's sum.
  virtual void reset() { reduce_.reset(); }
  // Forgets what was given or noted for this step alone, once it has ended or is abandoned.
  virtual void end_step() {}

 protected:
  // Returns this rank's values, which the sum replaces.
  virtual at::Tensor values() = 0;
  // Makes the sum at once, on a rank that has no step of its own.
  void sum_now(const at::Tensor& values, int64_t position) {
    collectives_.wait(*collectives_.start_sum(values, purpose_, *what_), what_, position);
  }

  Collectives& collectives_;

 private:
  const Purpose purpose_;
  const std::shared_ptr<const std::string> what_;
  std::unique_ptr<PendingReduce> reduce_;
};

}  // namespace drivetrain::ddp
