// Declares Parts, which chooses the values that a pass without a plan holds, so that backward replays a part at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "budget/recorder/tape.h"
#include "budget/recorder/value_store.h"

namespace drivetrain::budget {

// A profiled pass has no plan, and another pass may have left its plan. Replays in backward must not begin at the
// inputs of the pass, so it is cut into parts of equal bytes. Values that a later part reads are held, like the input
// of a block under torch.utils.checkpoint. A value that few operations replay from held ones is not held itself. If the
// held values exceed twice the bytes of a part, every two parts become one. So the memory of the pass grows with the
// square root of what a step saves.
class Parts {
 public:
  Parts(const Tape& tape, ValueStore& store, int64_t part_bytes)
      : tape_(tape), store_(store), part_bytes_(part_bytes) {}

  // Begins the operation of this index, and a part if the last one is complete. A part preferably begins where the
  // operation reads few bytes of the pass, because these may have to be held.
  void begin_op(int32_t op, int64_t read_bytes);
  // Notes that autograd saves a value that can be replayed.
  void note_save(int32_t value);
  // Notes that an operation, which will be replayed, has read a value that can be replayed. `memory` has what it read.
  void note_read(int32_t value, const at::Tensor& memory);
  // Forgets that it may let go of a value, because no replay can make it again.
  void keep(int32_t value);
  // Returns whether the value belongs to a part before the last.
  bool is_of_earlier_part(const Value& value) const { return !begins_.empty() && value.op < begins_.back(); }

 private:
  size_t part_of(int32_t op) const;
  bool is_near(int32_t value, size_t part);
  void let_go(int32_t value);
  void merge();

  const Tape& tape_;
  ValueStore& store_;
  std::vector<int32_t> begins_;                   // the first operations of the parts after the first
  std::unordered_map<int32_t, size_t> held_for_;  // per held value: the last part that reads it
  std::unordered_set<int32_t> saved_;             // the values that autograd has saved in the last part
  bool has_parts_ = false;                        // or had
  int64_t part_bytes_;
  int64_t saved_bytes_ = 0;
  int64_t held_bytes_ = 0;
};

}  // namespace drivetrain::budget
