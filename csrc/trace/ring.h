// Declares a fixed ring of timestamps that any thread writes without a lock and one thread reads. Needs no torch
// header.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "trace/device_clock.h"
#include "trace/phases.h"

namespace drivetrain::trace {

struct Record {
  enum class Kind : int32_t { kBegin, kEnd, kStep };

  int64_t time_ns = 0;     // of the host, when it was written
  int64_t elapsed_ns = 0;  // of the device, since the marked record before; set by the reader
  Kind kind = Kind::kBegin;
  Phase phase = Phase::kHost;
  int32_t thread = 0;      // a small number per thread of the process
  int64_t step = 0;        // kStep: the number of the step that ends
  int64_t tallied_ns = 0;  // kStep: recomputation within the step, which has no records of its own
  bool is_marked = false;  // a device's clock has a mark for it
};

// A full ring refuses records and counts them: a writer never waits, and never overwrites a record that is being read.
class Ring {
 public:
  static constexpr size_t kCapacity = size_t{1} << 13;

  // Both take the device's clock, or null. Only one thread may read at a time. A record whose mark the device has not
  // reached cannot be read yet, unless the reader passes no clock.
  bool write(const Record& record, DeviceClock* clock);
  std::optional<Record> read(DeviceClock* clock);
  bool is_empty() const;  // for the thread that reads
  int64_t num_refused() const { return num_refused_.load(std::memory_order_relaxed); }

 private:
  struct Slot {
    std::atomic<uint64_t> turn{0};  // 2 * lap: free for that lap's writer; 2 * lap + 1: holds that lap's record
    Record record;
  };

  std::array<Slot, kCapacity> slots_;
  std::atomic<uint64_t> head_{0};
  uint64_t tail_ = 0;
  std::atomic<int64_t> num_refused_{0};
};

}  // namespace drivetrain::trace
