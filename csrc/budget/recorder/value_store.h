// Declares ValueStore, which stores the values of a tape in their planned formats and counts their bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "budget/recorder/tape.h"

namespace drivetrain::budget {

class ValueStore {
 public:
  explicit ValueStore(Tape& tape) : tape_(tape) {}

  bool has(int32_t value) const;

  // Stores the value that `tensor` views: store() in its planned format, hold() unchanged.
  void store(int32_t value, const at::Tensor& tensor);
  void hold(int32_t value, const at::Tensor& tensor);
  void let_go(int32_t value);
  void let_go_all();

  // Converts a stored value back, so that it is held unchanged.
  void restore(int32_t value);

  // Makes the current stream wait until the copy of an offloaded value to the host has read its memory.
  void await_copy_out(int32_t value) const;

  // Starts the copies back from the host that the plan attaches to a value, when backward has taken it.
  void prefetch_at(int32_t value);

  // Returns the bytes that are stored now.
  int64_t bytes() const { return bytes_; }

 private:
  void prefetch(int32_t value);
  void count(int64_t bytes);

  Tape& tape_;
  int64_t bytes_ = 0;
};

}  // namespace drivetrain::budget
