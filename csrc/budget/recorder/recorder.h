// Declares Recorder, which records the forward passes of a model between enter() and leave(), one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "budget/recorder/recorded_pass.h"
#include "budget/recorder/tape.h"

namespace drivetrain::budget {

// Call leave() from a destructor. Python's own cleanup code may not run to its end when an exception comes from outside
// (an interrupt, a signal handler, another thread).
class Recorder {
 public:
  // is_profile: measures passes instead of following plans.
  explicit Recorder(bool is_profile) : shared_(std::make_shared<Shared>(is_profile)) {}
  ~Recorder();

  // Sets the plans for passes. Plan i is for a pass that begins while i others wait for their backward.
  void set_plans(std::vector<std::shared_ptr<TapePlan>> plans);

  // Returns the mean seconds per pass since reset() that replaying takes, for each operation of each plan.
  std::vector<std::vector<double>> seconds_by_op() const;
  void reset();

  // Returns the pass that begins. Returns null inside of a pass, whose budget covers the call. If another thread
  // records a pass, throws if must_record, else returns null.
  std::shared_ptr<RecordedPass> enter(bool must_record = false);
  // is_complete: the pass has returned. If an exception ended it, the recorder learns nothing from it, and leave() does
  // not throw.
  void leave(const std::shared_ptr<RecordedPass>& pass, bool is_complete);
  // Ends the pass that is being recorded. A pass of another thread ends with its next operation.
  void stop();
  // Returns the module index with which operations of this thread's pass are recorded; -1: none.
  int32_t module() const;
  void set_module(int32_t module);

  // Frees the values of the passes that wait for their backward, because it will not run.
  void abandon();

  // Returns the passes of this profile that were recorded since the last call.
  std::vector<std::shared_ptr<RecordedPass>> take_profiled();
  Shared& shared() { return *shared_; }
  // Describes where the last pass left its plan; empty: nowhere.
  const std::string& divergence() const { return divergence_; }

 private:
  bool is_on_this_thread() const;
  void warn_if_exceeded();
  void end(const std::shared_ptr<RecordedPass>& pass, bool is_complete);

  const std::shared_ptr<Shared> shared_;
  std::vector<std::shared_ptr<TapePlan>> plans_;
  std::shared_ptr<RecordedPass> pass_;                // that is being recorded
  std::vector<std::weak_ptr<RecordedPass>> waiting_;  // for their backward
  std::vector<std::weak_ptr<RecordedPass>> failed_;   // their graphs may be alive
  std::vector<std::shared_ptr<RecordedPass>> profiled_;
  std::string divergence_;
  bool has_warned_ = false;
  int64_t num_passes_ = 0;  // under these plans
};

}  // namespace drivetrain::budget
