// Implements the process's trace. One ring lives as long as the process, because threads that no monitor owns may write
// at any time.
#include "trace/reader.h"

#include "base/check.h"
#include "base/clock.h"
#include "trace/ring.h"
#include "trace/span.h"

namespace drivetrain::trace {
namespace {

std::atomic<bool> is_tracing{false};
std::atomic<int64_t> recomputed_ns{0};
thread_local bool is_tallying = false;

Ring& ring() {
  static Ring* const kRing = new Ring;  // never freed: threads may outlive static objects
  return *kRing;
}

int32_t this_thread() {
  static std::atomic<int32_t> num_threads{0};
  thread_local const int32_t number = num_threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

}  // namespace

bool is_on() { return is_tracing.load(std::memory_order_relaxed); }

void begin(Phase phase) { ring().write({clock_ns(), Record::Kind::kBegin, phase, this_thread()}); }

void end(Phase phase) { ring().write({clock_ns(), Record::Kind::kEnd, phase, this_thread()}); }

void end_step(int64_t step) {
  ring().write({clock_ns(), Record::Kind::kStep, Phase::kHost, this_thread(), step, recomputed_ns.exchange(0)});
}

RecomputationTally::RecomputationTally() {
  if (!is_on() || is_tallying) return;
  is_tallying = true;
  begin_ns_ = clock_ns();
}

RecomputationTally::~RecomputationTally() {
  if (begin_ns_ == 0) return;
  is_tallying = false;
  recomputed_ns.fetch_add(clock_ns() - begin_ns_, std::memory_order_relaxed);
}

Reader::Reader(bool copies_batches, bool sees_forwards) : accountant_(copies_batches, sees_forwards) {
  if (is_tracing.exchange(true)) {
    has_stopped_ = true;
    throw UserError("a monitor is active already in this process: leave its block before another one begins");
  }
  while (ring().read()) {
  }
  num_refused_before_ = ring().num_refused();
  recomputed_ns.store(0);
}

void Reader::stop() {
  if (!has_stopped_.exchange(true)) is_tracing.store(false);
}

std::vector<StepAccount> Reader::read() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StepAccount> accounts;
  while (const std::optional<Record> record = ring().read()) {
    if (auto account = accountant_.take(*record, ring().num_refused())) accounts.push_back(*account);
  }
  return accounts;
}

Standing Reader::standing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return accountant_.standing();
}

int64_t Reader::num_refused() const { return ring().num_refused() - num_refused_before_; }

}  // namespace drivetrain::trace
