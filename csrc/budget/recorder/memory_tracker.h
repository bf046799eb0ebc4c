// The books of a recorder: what its tapes keep alive for backward, in bytes, and what replaying cost. Forward passes
// record without the GIL, so that every entry takes a lock.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace drivetrain::budget {

class Tape;

class Ledger {
 public:
  void add(int64_t bytes);
  // What autograd keeps itself, which does not say when it gives it back: counts until its memory goes, at the latest
  // until `of` is closed.
  void add_unhooked(const Tape* of, c10::weak_intrusive_ptr<c10::StorageImpl> storage, int64_t bytes);

  void open(const std::shared_ptr<Tape>& tape);
  void close(const Tape* tape);
  std::vector<std::shared_ptr<Tape>> tapes() const;  // that are open

  int64_t live_bytes();
  int64_t peak_bytes() const;  // since reset()
  void reset();

  void note_replay(double seconds);
  int64_t num_replayed() const;
  double replay_seconds() const;  // on the host

  int64_t num_uses() const;
  int64_t next_use();  // by autograd, of a profile: its place among those of all tapes

 private:
  struct Unhooked {
    const Tape* of;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t bytes;
  };

  void add_locked(int64_t bytes);
  template <class Predicate>
  void forget_if(const Predicate& is_over);
  void forget_freed();

  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Tape>> tapes_;
  std::vector<Unhooked> unhooked_;
  int64_t live_bytes_ = 0;
  int64_t next_look_ = 0;  // at unhooked_: when so much is alive
  int64_t peak_bytes_ = 0;
  int64_t num_replayed_ = 0;
  double replay_seconds_ = 0;
  int64_t num_uses_ = 0;
};

}  // namespace drivetrain::budget
