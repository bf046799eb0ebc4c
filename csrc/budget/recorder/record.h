// The recorder: while a forward pass is between enter() and leave(), every operation of this thread goes on a tape.
// Whoever enters leaves in a destructor: Python's own cleanup does not run to its end when an exception comes from
// outside (an interrupt, a signal handler, another thread).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "budget/recorder/tape.h"

namespace drivetrain::budget {

class Recorder {
 public:
  explicit Recorder(Purpose purpose);
  ~Recorder();

  // One for each forward pass that is under way or waits for its backward when the next begins.
  void set_plans(std::vector<TapePlan> plans);

  // A weak reference of Python's to the module whose passes these are.
  void set_model(WeakModule model) { model_ = std::move(model); }

  // Of each operation of each plan, since reset().
  std::vector<std::vector<double>> seconds_by_op() const;  // that replaying takes in a pass, on average
  void reset();

  enum class Place {
    kOutermost,  // a pass begins
    kInside,     // a pass of this recorder or another one, whose budget is for all that is inside
    kRefused,    // another thread's pass is being recorded, and this one's is not
  };
  struct Entry {
    Place place;
    std::shared_ptr<Tape> tape;  // of the pass that has begun
  };
  Entry enter();
  // Where a pass has failed (`is_whole` is false) nothing is learned from it, and this does not throw.
  void leave(const Entry& entry, bool is_whole);
  // Ends the pass that is being recorded, whoever should have: another thread's with its next operation.
  void stop();
  // Which module the operations of this thread's pass are noted for; -1: none.
  int32_t module() const;
  void set_module(int32_t module);

  // Nobody will run the backward of the passes that wait for it: what they keep goes.
  void abandon();

  // The tapes of this profile since the last call of it.
  std::vector<std::shared_ptr<Tape>> take_tapes();
  Ledger& ledger() { return *ledger_; }
  Forms& forms() { return *forms_; }
  // How the last pass parted from its plan; empty: it did not.
  std::string divergence() const;

 private:
  const Purpose purpose_;
  const std::shared_ptr<Ledger> ledger_;
  const std::shared_ptr<Forms> forms_;
  std::vector<std::shared_ptr<TapePlan>> plans_;
  bool is_mine() const;  // the pass that is being recorded: this thread's
  void end(const std::shared_ptr<Tape>& tape, bool is_whole);

  std::shared_ptr<Tape> tape_;  // of the pass that is being recorded
  std::vector<std::weak_ptr<Tape>> waiting_;
  std::vector<std::weak_ptr<Tape>> failed_;  // whose graphs somebody may have
  std::vector<std::shared_ptr<Tape>> profiled_;
  std::string divergence_;
  WeakModule model_;
  int64_t num_passes_ = 0;  // under these plans
};

}  // namespace drivetrain::budget
