// Carries a keeping out on a trace, with sizes and times instead of memory and work.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "budget/solver/trace_index.h"

namespace drivetrain::budget {

// What happened when, by use; a use is before what follows from it.
struct Timeline {
  std::vector<int64_t> peak_bytes;       // per use, the most while it is carried out; one more in front: after forward
  std::vector<int32_t> replayed_at;      // per op: the use that replayed it, -1: none
  std::vector<int32_t> brought_back_at;  // per value: the use that brought it back from its form, -1: none
};

// Throws UserError if the keeping cannot be.
Timeline timeline_of(const Trace& trace, const Keeping& keeping);

// Keeps its memory from one run to the next. The index must outlive it.
class Simulator {
 public:
  explicit Simulator(const TraceIndex& index);

  // The first needed value that cannot be had that way, and why; empty: there is none.
  std::string first_error(const Keeping& keeping);
  // Of a keeping without such an error.
  Outcome run(const Keeping& keeping, Timeline* timeline = nullptr);
  // Of the last run: at the end of forward.
  bool was_needed(int32_t value) const { return was_needed_[value]; }

 private:
  enum class Presence : uint8_t { kAbsent, kInForm, kInFull };

  void find_needed(const std::vector<int32_t>& tickets);
  void make_present(int32_t value);
  void bring_back(int32_t value);
  void replay(int32_t op);
  void no_longer_read_by(int32_t op);
  void drop_one_need(int32_t value);
  void note_peak(int64_t bytes) { peak_now_ = bytes > peak_now_ ? bytes : peak_now_; }

  struct Frame {
    int32_t op;
    int32_t next_read;
  };

  const TraceIndex& index_;
  std::vector<int64_t> bytes_;  // per value: what index_.trace says, close together
  const Keeping* keeping_ = nullptr;
  std::vector<int32_t> needs_;           // per value: tickets, and ops to be replayed that read it
  std::vector<int32_t> needed_outputs_;  // per op that has not been replayed: forgotten ones
  std::vector<uint8_t> is_replayed_;     // per op
  std::vector<Presence> presence_;       // per value
  std::vector<uint8_t> was_needed_;
  std::vector<Frame> frames_;
  std::vector<int32_t> dropped_;
  Timeline* timeline_ = nullptr;
  int32_t now_ = 0;
  int64_t bytes_now_ = 0;
  int64_t peak_now_ = 0;
  double seconds_ = 0;
};

}  // namespace drivetrain::budget
