// Implements the process's trace. One ring lives as long as the process, because threads that no monitor owns may write
// at any time.
#include "trace/reader.h"

#include <map>
#include <memory>

#include "base/check.h"
#include "base/clock.h"
#include "trace/ring.h"
#include "trace/span.h"

namespace drivetrain::trace {
namespace {

std::atomic<bool> is_tracing{false};
std::atomic<int64_t> recomputed_ns{0};
std::atomic<DeviceClock*> device_clock{nullptr};  // of the active reader; null: times are the host's
thread_local bool is_tallying = false;

Ring& ring() {
  static Ring* const kRing = new Ring;  // never freed: threads may outlive static objects
  return *kRing;
}

// Clocks are never freed, either.
DeviceClock* clock_of(int device) {
  static std::mutex* const kMutex = new std::mutex;
  static auto* const kClocks = new std::map<int, std::unique_ptr<DeviceClock>>;
  const std::lock_guard<std::mutex> lock(*kMutex);
  std::unique_ptr<DeviceClock>& clock = (*kClocks)[device];
  if (!clock) clock = make_device_clock(device, Ring::kCapacity);
  return clock.get();
}

void write(const Record& record) { ring().write(record, device_clock.load(std::memory_order_acquire)); }

int32_t this_thread() {
  static std::atomic<int32_t> num_threads{0};
  thread_local const int32_t number = num_threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

}  // namespace

bool is_on() { return is_tracing.load(std::memory_order_relaxed); }

void begin(Phase phase) {
  write({.time_ns = clock_ns(), .kind = Record::Kind::kBegin, .phase = phase, .thread = this_thread()});
}

void end(Phase phase) {
  write({.time_ns = clock_ns(), .kind = Record::Kind::kEnd, .phase = phase, .thread = this_thread()});
}

void end_step(int64_t step) {
  write({.time_ns = clock_ns(),
         .kind = Record::Kind::kStep,
         .thread = this_thread(),
         .step = step,
         .tallied_ns = recomputed_ns.exchange(0)});
}

RecomputationTally::RecomputationTally() {
  if (!is_on() || is_tallying) return;
  is_tallying = true;
  has_span_ = device_clock.load(std::memory_order_relaxed) != nullptr;
  if (has_span_) begin(Phase::kRecomputation);
  begin_ns_ = clock_ns();
}

RecomputationTally::~RecomputationTally() {
  if (begin_ns_ == 0) return;
  is_tallying = false;
  if (has_span_) {
    end(Phase::kRecomputation);
  } else {
    recomputed_ns.fetch_add(clock_ns() - begin_ns_, std::memory_order_relaxed);
  }
}

TraceReader::TraceReader(bool sees_forwards) : accountant_(sees_forwards) {
  if (is_tracing.exchange(true)) {
    has_stopped_ = true;
    throw UserError("a monitor is active already in this process: leave its block before another one begins");
  }
  device_clock.store(nullptr);
  while (ring().read(nullptr)) {
  }
  num_refused_before_ = ring().num_refused();
  recomputed_ns.store(0);
}

void TraceReader::follow_device(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  clock_ = clock_of(device);
  clock_->restart();
  has_mark_ = false;
  accountant_.expect_copies();
  device_clock.store(clock_, std::memory_order_release);
}

void TraceReader::stop() {
  if (!has_stopped_.exchange(true)) is_tracing.store(false);
}

std::vector<StepAccount> TraceReader::read() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StepAccount> accounts;
  while (const std::optional<Record> record = ring().read(clock_)) {
    ++num_read_;
    if (auto account = accountant_.take(*record, time_of(*record), ring().num_refused())) accounts.push_back(*account);
  }
  return accounts;
}

// A record without a mark, as within a capture, takes no time on the device.
int64_t TraceReader::time_of(const Record& record) {
  if (!has_mark_) {
    has_mark_ = clock_ != nullptr && record.is_marked;
    now_ns_ = record.time_ns;
  } else if (record.is_marked) {
    now_ns_ += record.elapsed_ns;
  }
  return now_ns_;
}

bool TraceReader::has_read_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ring().is_empty();
}

Standing TraceReader::standing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return accountant_.standing();
}

int64_t TraceReader::num_read() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_read_;
}

int64_t TraceReader::num_refused() const { return ring().num_refused() - num_refused_before_; }

}  // namespace drivetrain::trace
