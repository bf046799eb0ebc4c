// Where a reducer is in its steps, for a thread that must not wait for the reducer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace drivetrain::ddp {

int64_t clock_ns();  // of the monotonic clock

// Adds the time from its construction to its end.
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

// Thread safe: its own mutex is held for moments only, never while anybody waits.
class Progress {
 public:
  // Places in a step, in the order in which a rank comes by. A rank whose (step, place) is less than another's has not
  // got as far.
  static constexpr int64_t kIdle = 0;       // between steps
  static constexpr int64_t kForward = 1;    // a forward whose backward shall synchronise has begun
  static constexpr int64_t kBackward = 2;   // the forward has ended
  static constexpr int64_t kGradients = 3;  // the first has come; plus the number of buckets given to the transport

  struct Snapshot {
    int64_t step = 1;  // the synchronised step under way, or the next
    int64_t place = kIdle;
    std::string awaited;  // "" if nothing
    int64_t needed = 0;   // the place in this step at which a rank has begun what is awaited
    double seconds = 0;   // since any of this changed
    double wait_s = 0;    // the time that a step spends waiting: the median over the last ones
    int64_t num_waits = 0;
  };
  Snapshot snapshot() const;

  void move_to(int64_t step, int64_t place);
  void end_step();

  // Around a wait for what ranks begin at the place `needed`; this one is there, too.
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

  // Marks the end of a step's work on a device, which the host may be far ahead of: calls set_mark now. The watching
  // thread calls has_ended until that says so, but never while another mark is set.
  void end_on_device(const std::function<void()>& set_mark, std::function<bool()> has_ended);
  // How long a device has not come to the mark of a step.
  struct DeviceLag {
    int64_t step = 0;
    double seconds = 0;  // since the mark was set
  };
  std::optional<DeviceLag> device_lag();  // empty if the device has come to the last mark, or there is none

  // The step under way cannot end: whoever begins the next one, or waits, is to raise this.
  void give_up(std::string why);
  std::string why_given_up() const;

  // What the watching thread last said about a wait in that step; "" if nothing.
  void set_report(int64_t step, std::string report);
  std::string report(int64_t step) const;

 private:
  static constexpr size_t kWaitsKept = 32;  // steps

  mutable std::mutex mutex_;
  int64_t step_ = 1;
  int64_t place_ = kIdle;
  int64_t needed_ = 0;
  int64_t since_ns_ = clock_ns();
  std::shared_ptr<const std::string> awaited_;
  int64_t waited_ns_ = 0;  // in this step
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
