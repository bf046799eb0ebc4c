// Defines MemoryTracker, which counts the bytes that recorded passes keep alive for backward and the cost of replays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace drivetrain::budget {

class RecordedPass;

struct Counts {
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;       // since reset(), as are the replays
  int64_t exceeding_bytes = 0;  // the most that the step has kept, if that is above the limit
  int64_t num_replayed = 0;
  double replay_seconds = 0;  // measured on the host
  int64_t num_uses = 0;       // of saved tensors by backward, over all profiled passes
};

// Serves all passes of one recorder. Every method takes a lock, because forward passes record without the GIL.
class MemoryTracker {
 public:
  Counts counts() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }
  // Adds to the live bytes; a negative number subtracts.
  void add(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.live_bytes += bytes;
    counts_.peak_bytes = std::max(counts_.peak_bytes, counts_.live_bytes);
    if (counts_.live_bytes > limit_bytes_) {
      counts_.exceeding_bytes = std::max(counts_.exceeding_bytes, counts_.live_bytes);
    }
  }
  // Sets the bytes that a step may keep.
  void set_limit(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_bytes_ = bytes;
  }
  void begin_step() {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.exceeding_bytes = 0;
  }
  void reset() {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.peak_bytes = counts_.live_bytes;
    counts_.num_replayed = 0;
    counts_.replay_seconds = 0;
  }
  void count_replay(double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.replay_seconds += seconds;
    ++counts_.num_replayed;
  }
  // Returns the number of the next use of a saved tensor.
  int64_t next_use() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_.num_uses++;
  }

  void open(const std::shared_ptr<RecordedPass>& pass) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(passes_, [](const std::weak_ptr<RecordedPass>& other) { return other.expired(); });
    passes_.push_back(pass);
  }
  // Returns the passes that were opened and are still alive.
  std::vector<std::shared_ptr<RecordedPass>> passes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<RecordedPass>> alive;
    for (const std::weak_ptr<RecordedPass>& pass : passes_) {
      if (auto one = pass.lock()) alive.push_back(std::move(one));
    }
    return alive;
  }

 private:
  mutable std::mutex mutex_;
  Counts counts_;
  int64_t limit_bytes_ = INT64_MAX;
  std::vector<std::weak_ptr<RecordedPass>> passes_;
};

}  // namespace drivetrain::budget
