// Declares a reducer's progress through its steps, for a thread that must not wait for the reducer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.h"

namespace drivetrain::ddp {

// The times of a synchronized step, in nanoseconds of the monotonic clock; 0: has not happened.
struct StepTimes {
  int64_t forward_start = 0;
  int64_t backward_start = 0;  // the first gradient came
  int64_t backward_end = 0;    // the last gradient came
  int64_t comm_start = 0;      // the first bucket started
  int64_t comm_end = 0;        // the last bucket was reduced
  int64_t buckets_reduced = 0;
  int64_t exposed = 0;  // duration for which backward waited in or for a transport or a communication hook
};

// Adds its lifetime, in nanoseconds, to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t& sum) : sum_(sum), begin_(clock_ns()) {}
  ~Stopwatch() { sum_ += clock_ns() - begin_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  int64_t& sum_;
  const int64_t begin_;
};

// Thread safe. Its mutex is held for moments only, never while a rank waits.
class Progress {
 public:
  // Positions in a step, in the order in which a rank reaches them. A rank with the smaller (step, position) is behind.
  static constexpr int64_t kIdle = 0;       // between steps
  static constexpr int64_t kForward = 1;    // a forward whose backward will synchronize has begun
  static constexpr int64_t kBackward = 2;   // that forward has ended
  static constexpr int64_t kGradients = 3;  // the first gradient has come; plus the number of buckets that have started
  static constexpr int64_t after_bucket(size_t index) { return kGradients + static_cast<int64_t>(index) + 1; }

  struct Snapshot {
    int64_t step = 1;  // the current synchronized step, or the next
    int64_t position = kIdle;
    std::string awaited;    // a collective; "": none
    int64_t needed = 0;     // the position in this step at which a rank has started the awaited collective
    double seconds = 0;     // since the last change
    double wait_s = 0;      // seconds per step spent waiting: the median over the last 32 steps
    int64_t num_waits = 0;  // steps that have ended
  };
  Snapshot snapshot() const;

  void move_to(int64_t step, int64_t position);
  void end_step();

  // Marks a wait for a collective that ranks start at the position `needed`, which this rank has reached.
  class Wait {
   public:
    Wait(Progress& progress, std::shared_ptr<const std::string> what, int64_t needed);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    Progress& progress_;
  };
  void begin_wait(std::shared_ptr<const std::string> what, int64_t needed);
  void end_wait();

  // Calls set_mark, which marks the end of a step's work on a device; the host may be far ahead of it. The watchdog
  // thread calls has_ended until that returns true, but never while another mark is set.
  void end_on_device(const std::function<void()>& set_mark, std::function<bool()> has_ended);
  // The time for which a device has not reached the mark of a step.
  struct DeviceLag {
    int64_t step = 0;
    double seconds = 0;  // since the mark was set
  };
  std::optional<DeviceLag> device_lag();  // empty if the device has reached the last mark, or no mark is set

  // Declares that the current step cannot end. The next step raises this message when it begins.
  void give_up(std::string why);
  std::string why_given_up() const;

  // Keeps the watchdog's last report on a wait in that step; "" if it made none.
  void set_report(int64_t step, std::string report);
  std::string report(int64_t step) const;

 private:
  static constexpr size_t kWaitsKept = 32;  // steps

  mutable std::mutex mutex_;
  int64_t step_ = 1;
  int64_t position_ = kIdle;
  int64_t needed_ = 0;
  int64_t since_ns_ = clock_ns();
  std::shared_ptr<const std::string> awaited_;
  int64_t waited_ns_ = 0;  // so far in this step
  std::array<int64_t, kWaitsKept> waits_ns_{};
  int64_t num_waits_ = 0;
  int64_t reported_step_ = 0;
  std::string report_;
  std::function<bool()> has_device_ended_;
  int64_t marked_step_ = 0;
  int64_t marked_ns_ = 0;
  std::string why_given_up_;
};

}  // namespace drivetrain::ddp
