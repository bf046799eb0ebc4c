// Tests that accounts follow a device's clock: they come once the device is there, and hold its times, not the host's.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "native_tests.h"
#include "trace/device_clock.h"
#include "trace/reader.h"
#include "trace/span.h"

namespace drivetrain {
namespace trace {
namespace {

// A device whose progress the test decides.
struct Device {
  std::vector<int64_t> mark_ns;  // when it reaches each mark, in the order of the marks
  size_t num_marked = 0;
  size_t num_reached = 0;
  bool captures = false;
};

Device device;

class FakeClock final : public DeviceClock {
 public:
  explicit FakeClock(size_t num_slots) : mark_of_(num_slots) {}

  bool mark(size_t slot) noexcept override {
    if (device.captures) return false;
    mark_of_[slot] = device.num_marked++;
    return true;
  }

  std::optional<int64_t> elapsed_ns(size_t slot) noexcept override {
    const size_t mark = mark_of_[slot];
    if (mark >= device.num_reached) return std::nullopt;
    const int64_t elapsed = last_ ? device.mark_ns[mark] - *last_ : 0;
    last_ = device.mark_ns[mark];
    return elapsed;
  }

  void restart() noexcept override { last_.reset(); }

 private:
  std::vector<size_t> mark_of_;
  std::optional<int64_t> last_;
};

int64_t ns_of(const StepAccount& account, Phase phase) { return account.phase_ns[static_cast<size_t>(phase)]; }

void test_device_times() {
  device = {.mark_ns = {100, 130, 150, 170, 1170, 1180, 3180, 3680, 3700, 3800, 3810}};
  TraceReader reader(/*sees_forwards=*/true);
  reader.follow_device(0);
  end_step(0);              // 100
  begin(Phase::kData);      // 130
  end(Phase::kData);        // 150
  begin(Phase::kForward);   // 170: the copy takes 20
  end(Phase::kForward);     // 1170
  begin(Phase::kBackward);  // 1180: the loss takes 10
  {
    const RecomputationTally outer;  // 3180
    const RecomputationTally inner;  // is part of it
  }  // 3680
  end(Phase::kBackward);  // 3700
  device.captures = true;
  begin(Phase::kOptimizer);  // has no mark, and so the time of the mark before
  end(Phase::kOptimizer);
  device.captures = false;
  end_step(1);  // 3800
  expect(device.num_marked == 10, "a capture is not marked");

  expect(reader.read().empty(), "a device that has reached nothing gives no account");
  device.num_reached = 9;
  expect(reader.read().empty() && !reader.has_read_all(), "an account waits for the last mark of its step");
  device.num_reached = 10;
  const std::vector<StepAccount> accounts = reader.read();
  expect(accounts.size() == 1 && reader.has_read_all(), "the account comes once the device has ended the step");
  if (accounts.size() != 1) return;
  const StepAccount& account = accounts.front();
  expect(account.is_complete && account.wall_ns == 3700, "a step lasts as long as on the device");
  const std::pair<Phase, int64_t> expected[] = {
      {Phase::kData, 20},     {Phase::kCopy, 20},           {Phase::kForward, 1010}, {Phase::kBackward, 2020},
      {Phase::kOptimizer, 0}, {Phase::kRecomputation, 500}, {Phase::kHost, 130},
  };
  for (const auto& [phase, ns] : expected) {
    expect(ns_of(account, phase) == ns, "phase " + std::to_string(static_cast<int>(phase)) + " takes " +
                                            std::to_string(ns_of(account, phase)) + ", expected " + std::to_string(ns));
  }

  // A mark on another stream may be reached before an earlier one: it takes no time, and the sum stays right.
  device.mark_ns = {100, 130, 150, 170, 1170, 1180, 3180, 3680, 3700, 3800, 4000, 3900, 5000};
  begin(Phase::kForward);  // 4000
  end(Phase::kForward);    // 3900
  end_step(2);             // 5000
  device.num_reached = 13;
  const std::vector<StepAccount> later = reader.read();
  expect(later.size() == 1 && later[0].wall_ns == 1200 && ns_of(later[0], Phase::kHost) == 1200,
         "times that go back do not count twice");
}

void test_host_times_after_device_times() {
  device = {};
  TraceReader reader(/*sees_forwards=*/true);
  end_step(0);
  begin(Phase::kForward);
  end(Phase::kForward);
  end_step(1);
  expect(device.num_marked == 0, "a reader that follows no device marks none");
  expect(reader.read().size() == 1, "a reader that follows no device waits for none");
}

}  // namespace

std::unique_ptr<DeviceClock> make_device_clock(int, size_t num_slots) { return std::make_unique<FakeClock>(num_slots); }

}  // namespace trace

void test_trace() {
  trace::test_device_times();
  trace::test_host_times_after_device_times();
}

}  // namespace drivetrain
