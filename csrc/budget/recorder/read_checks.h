// Declares ReadChecks, which raises errors where a replay would read other contents than the forward pass did.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>

#include "budget/recorder/tape.h"

namespace drivetrain::budget {

// All errors are torch.utils.checkpoint.CheckpointError.
class ReadChecks {
 public:
  explicit ReadChecks(const Tape& tape) : tape_(tape) {}

  // Returns a tensor that existed before the pass, if it has neither been freed nor been written in place since.
  at::Tensor existing(const TensorRef& ref) const;

  // Raises if a value that is held has been written in place since it was stored. After the pass, its memory may belong
  // to the user as well, for instance as the result of the model.
  void check_unwritten(const TensorRef& ref) const;

  // Hashes the values that a replay of `op` will read from memory that other code may share; `stack` has its arguments.
  void note_checksums(RecordedOp& op, const torch::jit::Stack& stack) const;
  // Raises if these hashes have changed: a write that no version counter shows has happened since.
  void check_checksums(const RecordedOp& op) const;

 private:
  std::string name_of(const RecordedOp& op, const TensorRef& ref) const;

  const Tape& tape_;
};

}  // namespace drivetrain::budget
