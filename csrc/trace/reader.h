// Declares the reader of the process's trace, one per monitor. Needs no torch header.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "trace/account.h"

namespace drivetrain::trace {

// Turns the trace on while it lives, and accounts for what threads write. Throws UserError if another reader is active.
class Reader {
 public:
  Reader(bool copies_batches, bool sees_forwards);
  ~Reader() { stop(); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  void stop();                      // turns the trace off; what was written can still be read
  std::vector<StepAccount> read();  // the steps that have ended since the last call
  Standing standing();              // as of the records that read() has taken
  int64_t num_refused() const;      // records that found the ring full

 private:
  std::mutex mutex_;  // keeps two threads that read apart; no writer takes it
  Accountant accountant_;
  int64_t num_refused_before_ = 0;
  std::atomic<bool> has_stopped_{false};
};

}  // namespace drivetrain::trace
