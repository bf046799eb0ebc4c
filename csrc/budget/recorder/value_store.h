// Declares ValueStore, which stores the values of a tape in their planned formats and counts their bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

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

  // Start copies back from the host when backward has taken `value`. The first starts those that the plan attaches to
  // it. The second starts the copy of the last value offloaded before it, as backward visits values in reverse order.
  void prefetch_planned_at(int32_t value);
  void prefetch_before(int32_t value);

  // Returns the bytes that are stored now.
  int64_t bytes() const { return bytes_; }

 private:
  void prefetch(int32_t value);
  void count(int64_t bytes);

  Tape& tape_;
  std::vector<int32_t> offloaded_;  // in the order of the forward pass
  int64_t bytes_ = 0;
};

}  // namespace drivetrain::budget
