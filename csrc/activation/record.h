// The recorder: while a forward pass is between enter() and leave(), every operation of this thread goes on a tape.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "activation/tape.h"

namespace drivetrain::activation {

class Recorder {
 public:
  explicit Recorder(Purpose purpose);
  ~Recorder();

  // One for each forward pass that is under way or waits for its backward when the next begins.
  void set_plans(std::vector<TapePlan> plans);

  // Of each operation of each plan, since reset().
  std::vector<std::vector<double>> seconds_by_op() const;
  void reset();

  // False: another thread's pass is being recorded, and this one's is not.
  bool enter();
  // Where a pass has failed, nothing is learned from it.
  void leave(bool is_whole = true);
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
  std::shared_ptr<Tape> tape_;  // between enter() and leave()
  std::vector<std::weak_ptr<Tape>> waiting_;
  std::vector<std::shared_ptr<Tape>> profiled_;
  std::string divergence_;
  int depth_ = 0;
  std::thread::id thread_;   // that has entered
  int depth_of_others_ = 0;  // inside a pass that another recorder records
};

}  // namespace drivetrain::activation
