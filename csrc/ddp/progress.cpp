// Keeps a reducer's progress through its steps.
#include "ddp/progress.h"

#include <algorithm>
#include <utility>

#include "trace/span.h"

namespace drivetrain::ddp {

Progress::Snapshot Progress::snapshot() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Snapshot now;
  now.step = step_;
  now.position = position_;
  if (awaited_) now.awaited = *awaited_;
  now.needed = needed_;
  now.seconds = static_cast<double>(clock_ns() - since_ns_) * 1e-9;
  now.num_waits = num_waits_;
  std::array<int64_t, kWaitsKept> waits = waits_ns_;
  const int64_t kept = std::min<int64_t>(num_waits_, kWaitsKept);
  std::nth_element(waits.begin(), waits.begin() + kept / 2, waits.begin() + kept);
  now.wait_s = static_cast<double>(waits[kept / 2]) * 1e-9;
  return now;
}

void Progress::move_to(int64_t step, int64_t position) {
  const int64_t now = clock_ns();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (step != step_) waited_ns_ = 0;
  step_ = step;
  position_ = position;
  since_ns_ = now;
}

void Progress::end_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  waits_ns_[num_waits_++ % kWaitsKept] = waited_ns_;
  waited_ns_ = 0;
}

Progress::Wait::Wait(Progress& progress, std::shared_ptr<const std::string> what, int64_t needed)
    : progress_(progress) {
  progress_.begin_wait(std::move(what), needed);
}

Progress::Wait::~Wait() { progress_.end_wait(); }

void Progress::begin_wait(std::shared_ptr<const std::string> what, int64_t needed) {
  const int64_t now = clock_ns();
  const std::lock_guard<std::mutex> lock(mutex_);
  awaited_ = std::move(what);
  position_ = std::max(position_, needed);
  needed_ = needed;
  since_ns_ = now;
  if (trace::is_on()) trace::begin(trace::Phase::kCommunication);
}

void Progress::end_wait() {
  const int64_t now = clock_ns();
  if (trace::is_on()) trace::end(trace::Phase::kCommunication);
  const std::lock_guard<std::mutex> lock(mutex_);
  awaited_.reset();
  waited_ns_ += now - since_ns_;
  since_ns_ = now;
}

void Progress::end_on_device(const std::function<void()>& set_mark, std::function<bool()> has_ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  set_mark();
  has_device_ended_ = std::move(has_ended);
  marked_step_ = step_;
  marked_ns_ = clock_ns();
}

std::optional<Progress::DeviceLag> Progress::device_lag() {
  const std::lock_guard<std::mutex> lock(mutex_);
  // An answer is final. Querying an event would break a CUDA graph that a thread captures later.
  if (has_device_ended_ && has_device_ended_()) has_device_ended_ = nullptr;
  if (!has_device_ended_) return std::nullopt;
  return DeviceLag{marked_step_, static_cast<double>(clock_ns() - marked_ns_) * 1e-9};
}

void Progress::give_up(std::string why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  why_given_up_ = std::move(why);
}

std::string Progress::why_given_up() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return why_given_up_;
}

void Progress::set_report(int64_t step, std::string report) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reported_step_ = step;
  report_ = std::move(report);
}

std::string Progress::report(int64_t step) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return step == reported_step_ ? report_ : "";
}

}  // namespace drivetrain::ddp
