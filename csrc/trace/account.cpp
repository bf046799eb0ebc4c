// Implements the account of a step.
#include "trace/account.h"

#include <algorithm>

namespace drivetrain::trace {
namespace {

constexpr size_t index_of(Phase phase) { return static_cast<size_t>(phase); }

}  // namespace

std::optional<StepAccount> Accountant::take(const Record& record, int64_t at_ns, int64_t num_refused) {
  if (record.kind != Record::Kind::kStep) {
    if (!has_begun_) return std::nullopt;
    if (record.thread != thread_ && !is_of_worker(record)) return std::nullopt;
    written_ns_ = record.time_ns;
    spend_until(at_ns);
    record.kind == Record::Kind::kBegin ? begin(record) : end(record);
    return std::nullopt;
  }
  std::optional<StepAccount> finished;
  written_ns_ = record.time_ns;
  if (has_begun_) {
    spend_until(at_ns);
    account_.phase_ns[index_of(Phase::kHost)] += gap_ns_;
    if (!open_.empty() || num_refused != num_refused_) account_.is_complete = false;
    // Recomputation runs inside of the backward pass and is tallied apart from the records.
    int64_t& backward = account_.phase_ns[index_of(Phase::kBackward)];
    const int64_t recomputed = std::min(record.tallied_ns, backward);
    backward -= recomputed;
    account_.phase_ns[index_of(Phase::kRecomputation)] += recomputed;
    account_.step = record.step;
    account_.wall_ns = now_ns_ - account_.begin_ns;
    finished = account_;
  }
  account_ = StepAccount{};
  account_.begin_ns = now_ns_ = has_begun_ ? now_ns_ : at_ns;
  thread_ = record.thread;
  open_.clear();
  last_.reset();
  gap_ns_ = 0;
  has_begun_ = true;
  num_refused_ = num_refused;
  return finished;
}

void Accountant::spend_until(int64_t time_ns) {
  // Two threads may write in another order than they read the clock.
  const int64_t spent = std::max<int64_t>(time_ns - now_ns_, 0);
  (open_.empty() ? gap_ns_ : account_.phase_ns[index_of(open_.back())]) += spent;
  now_ns_ += spent;
  int64_t& longest = longest_ns_[index_of(innermost())];
  longest = std::max(longest, spent);
}

Standing Accountant::standing() const {
  if (!has_begun_) return {};
  return {innermost(), written_ns_, longest_ns_[index_of(innermost())]};
}

Phase Accountant::phase_of_gap(Phase next) const {
  if (last_ == Phase::kData && next == Phase::kForward && copies_batches_) return Phase::kCopy;
  if (last_ == Phase::kData && next == Phase::kBackward && !sees_forwards_) return Phase::kForward;
  if (last_ == Phase::kForward && next == Phase::kBackward) return Phase::kForward;
  if (last_ == Phase::kBackward && next == Phase::kOptimizer) return Phase::kOptimizer;
  return Phase::kHost;
}

// Autograd's threads write while the training thread waits for the backward pass.
bool Accountant::is_of_worker(const Record& record) const {
  if (record.phase != Phase::kCommunication && record.phase != Phase::kRecomputation) return false;
  return std::find(open_.begin(), open_.end(), Phase::kBackward) != open_.end();
}

void Accountant::begin(const Record& record) {
  if (open_.empty()) {
    account_.phase_ns[index_of(phase_of_gap(record.phase))] += gap_ns_;
    gap_ns_ = 0;
    account_.num_forwards += record.phase == Phase::kForward;
  }
  open_.push_back(record.phase);
}

void Accountant::end(const Record& record) {
  const auto found = std::find(open_.rbegin(), open_.rend(), record.phase);
  if (found == open_.rend()) {
    account_.is_complete = false;
    return;
  }
  if (found != open_.rbegin()) account_.is_complete = false;
  open_.erase(std::prev(found.base()), open_.end());
  if (open_.empty()) last_ = record.phase;
}

}  // namespace drivetrain::trace
