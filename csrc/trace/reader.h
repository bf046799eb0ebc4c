// Declares the reader of the process's trace, one per monitor. Needs no torch header.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "trace/account.h"

namespace drivetrain::trace {

// Turns the trace on while it lives, and accounts for the records that threads write. Throws UserError if another
// reader is active.
class TraceReader {
 public:
  explicit TraceReader(bool sees_forwards);
  ~TraceReader() { stop(); }
  TraceReader(const TraceReader&) = delete;
  TraceReader& operator=(const TraceReader&) = delete;

  // Takes the times at which that CUDA device reaches the marks from now on. An account then shows the device's work
  // and waits. Steps then come once the device has ended them.
  void follow_device(int device);

  void stop();                      // turns the trace off; what was written can still be read
  std::vector<StepAccount> read();  // the steps that have ended since the last call
  Standing standing();              // as of the records that read() has taken
  bool has_read_all();              // false: a device has not reached the last marks yet
  int64_t num_refused() const;      // records that found the ring full
  int64_t num_read();               // records that read() has taken

 private:
  int64_t time_of(const Record& record);

  std::mutex mutex_;  // keeps two threads that read apart; no writer takes it
  Accountant accountant_;
  DeviceClock* clock_ = nullptr;
  bool has_mark_ = false;  // the clock's first mark has been read
  int64_t now_ns_ = 0;     // of the last record
  int64_t num_read_ = 0;
  int64_t num_refused_before_ = 0;
  std::atomic<bool> has_stopped_{false};
};

}  // namespace drivetrain::trace
