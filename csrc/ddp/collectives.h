// Declares the collectives of a reducer's steps: how they start, how they are awaited and how their errors read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/transfer.h"
#include "ddp/progress.h"
#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

// Counts the synchronized steps and gives each collective of a step its tag.
//
// Invariants: all ranks of the transport have finished the same number of steps when they start the same collective. A
// wait is visible in progress() while it lasts.
class Collectives {
 public:
  // The parts of the reducer that a failed collective affects.
  struct Recovery {
    std::function<void()> forget_step;      // abandons the step
    std::function<bool()> end_hooked_step;  // where a communication hook reduces: ends the step and returns true
  };

  // wrapper: names the wrapper in messages of processes that have several. Ranks must construct theirs in the same
  // order.
  Collectives(std::shared_ptr<Comm> comm, std::string wrapper);
  void set_recovery(Recovery recovery) { recovery_ = std::move(recovery); }
  // ended_ranks: names the ranks whose processes have ended, "" if none is known to; called after a failure.
  void set_ended_ranks(std::function<std::string()> ended_ranks) { ended_ranks_ = std::move(ended_ranks); }
  // Takes another set of ranks and counts steps from 0.
  void set_comm(std::shared_ptr<Comm> comm);

  Comm& comm() const { return *comm_; }
  std::string own_name() const { return comm_->ranks().name(comm_->rank()); }
  const std::shared_ptr<Progress>& progress() const { return progress_; }
  int64_t steps() const { return steps_; }  // finished
  void count_step() { ++steps_; }
  // Publishes where this rank is in the current step, as a position of Progress.
  void move_to(int64_t position) { progress_->move_to(steps_ + 1, position); }

  // Says which collectives of the step come next, so that hosts agree on them while gradients come. Need not be kept.
  void promise(const std::vector<std::pair<Purpose, size_t>>& purposes);  // with their buckets
  // Tells the other ranks which collective comes next, where this object does not start it. Abandons the step and
  // throws if another rank's collective does not belong to it. what: the collective's name in the error.
  void announce(Purpose purpose, const std::string& what, size_t bucket = 0);
  // Returns true if the ranks can compare values without a collective.
  bool can_compare() const { return comm_->board() != nullptr; }
  // Shows the other ranks the checksum of a parameter that a hook has changed. Throws like announce() if theirs differ.
  // warning: goes with the error of a collective that fails later in the step.
  void compare_change(size_t param, int64_t checksum, std::string warning);
  // Returns how two ranks have differed in a collective; "": they have not.
  std::string difference() const { return comm_->board() != nullptr ? comm_->board()->difference() : ""; }

  // ranges: the part of the result that each rank needs; null: everything. weight: this rank's, where the sum of
  // weights divides the result. Resets it on all ranks if the transport leaves that to the caller.
  std::unique_ptr<PendingReduce> start_bucket(const at::Tensor& flat, size_t index, bool as_sum, Purpose purpose,
                                              const std::shared_ptr<const RankRanges>& ranges,
                                              std::optional<double>& weight);
  // Starts a sum besides the buckets. what: the collective's name in errors, which end the step.
  std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat, Purpose purpose, const std::string& what);
  // Waits for a collective of the step. what: the collective's name in reports; position: the place in the step where
  // ranks started it.
  void wait(PendingReduce& reduce, const std::shared_ptr<const std::string>& what, int64_t position);

  // The following four communicate at once, where the step's first gradient has come.

  // Sums `flat` over ranks, in place. before_start: called once the ranks have agreed on what they start.
  void sum_now(const at::Tensor& flat, const std::string& what, Purpose purpose = Purpose::kPlan,
               const std::function<void()>& before_start = {});
  // Returns rank 0's values, so that ranks that measured or computed other values agree.
  std::vector<int64_t> from_rank_0(const std::vector<int64_t>& values, const std::string& what, c10::Device device);
  // Returns every rank's values on the host: per rank float64 [values.size()]. They travel as tensors of the device,
  // since a process group may take no others.
  std::vector<at::Tensor> gather(const std::vector<double>& values, const std::string& what, c10::Device device);
  // As gather(), but the host does not wait for the values. read() takes them in a later step.
  std::unique_ptr<LateValue> gather_late(const std::vector<double>& values, const std::string& what,
                                         c10::Device device);
  // Returns what gather_late() gathered. Waits for it, if need be.
  std::vector<at::Tensor> read(const LateValue& gathered, const std::string& what) const;

  // Throws the error of a failed collective. report: of the transport.
  [[noreturn]] void fail(const std::string& what, const std::string& report) const;
  // Abandons the step and throws. The arguments are copies, as they may belong to the step.
  [[noreturn]] void fail_step(std::string what, std::string report) const;

 private:
  Tag tag(Purpose purpose, size_t bucket) const { return {purpose, steps_ + 1, bucket, wrapper_number_}; }
  void show(const Tag& shown);
  void show(Purpose purpose, size_t bucket = 0) { show(tag(purpose, bucket)); }
  void await(PendingReduce& reduce) const;
  at::Tensor sum_of_rows(const std::vector<double>& values, const std::string& what, c10::Device device);
  std::vector<at::Tensor> rows(const at::Tensor& gathered) const;

  std::shared_ptr<Comm> comm_;
  uint64_t wrapper_number_ = 0;  // on the board
  const std::string wrapper_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  Recovery recovery_;
  std::function<std::string()> ended_ranks_;
  std::string change_;  // the warning of compare_change() in the current step
  int64_t steps_ = 0;
};

}  // namespace drivetrain::ddp
