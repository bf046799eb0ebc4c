// Declares MemoryTracker, which counts the bytes that recorded passes keep alive for backward and the cost of replays.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace drivetrain::budget {

class RecordedPass;
struct Tape;

// Serves all passes of one recorder. Every method takes a lock, because forward passes record without the GIL.
class MemoryTracker {
 public:
  // Adds to the live bytes; a negative number subtracts.
  void add(int64_t bytes);
  // Adds memory that autograd keeps without our hooks, and whose release it does not announce. The bytes count until
  // the storage is freed, at the latest until close() is called for the same tape.
  void add_unhooked(const Tape& tape, c10::weak_intrusive_ptr<c10::StorageImpl> storage, int64_t bytes);

  void open(const std::shared_ptr<RecordedPass>& pass);
  void close(const Tape& tape);
  // Returns the passes that were opened and are still alive.
  std::vector<std::shared_ptr<RecordedPass>> passes() const;

  int64_t live_bytes();
  int64_t peak_bytes() const;  // since reset()

  // Sets the bytes that a step may keep.
  void set_limit(int64_t bytes);
  void begin_step();
  // Returns the most bytes that the step has kept, if they are above the limit, else 0.
  int64_t exceeding_bytes() const;
  void reset();

  void count_replay(double seconds);
  int64_t num_replayed() const;
  double replay_seconds() const;  // measured on the host

  // Numbers the uses of saved tensors by backward in their order over all profiled passes.
  int64_t num_uses() const;
  int64_t next_use();

 private:
  struct Unhooked {
    const Tape* tape;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t bytes;
  };

  void add_locked(int64_t bytes);
  template <class Predicate>
  void forget_if(const Predicate& is_over);
  void forget_freed();

  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<RecordedPass>> passes_;
  std::vector<Unhooked> unhooked_;
  int64_t live_bytes_ = 0;
  int64_t next_check_bytes_ = 0;  // the live bytes from which unhooked_ is searched for freed storages again
  int64_t peak_bytes_ = 0;
  int64_t limit_bytes_ = INT64_MAX;
  int64_t exceeding_bytes_ = 0;
  int64_t num_replayed_ = 0;
  double replay_seconds_ = 0;
  int64_t num_uses_ = 0;
};

}  // namespace drivetrain::budget
