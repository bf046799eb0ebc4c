// Declares a fixed ring of timestamps that any thread writes without a lock and one thread reads. Needs no torch
// header.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "trace/phases.h"

namespace drivetrain::trace {

struct Record {
  enum class Kind : int32_t { kBegin, kEnd, kStep };

  int64_t time_ns = 0;
  Kind kind = Kind::kBegin;
  Phase phase = Phase::kHost;
  int32_t thread = 0;      // a small number per thread of the process
  int64_t step = 0;        // kStep: the number of the step that ends
  int64_t tallied_ns = 0;  // kStep: recomputation within the step, which has no records of its own
};

// A full ring refuses records and counts them: a writer never waits, and never overwrites what is being read.
class Ring {
 public:
  static constexpr size_t kCapacity = size_t{1} << 13;

  bool write(const Record& record);
  std::optional<Record> read();  // for one thread at a time
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
