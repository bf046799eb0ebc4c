// Declares checks that raise torch.utils.checkpoint.CheckpointError where a replay would read other contents than the
// forward pass did.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "budget/recorder/tape.h"

namespace drivetrain::budget {

// Returns a tensor that existed before the pass, if it has neither been freed nor been written in place since.
at::Tensor existing(const TensorRef& ref);

// Raises if a value that is held has been written in place since it was stored. After the pass, its memory may belong
// to the user as well, for instance as the result of the model.
void check_unwritten(const Tape& tape, const TensorRef& ref);

// Hashes the values that a replay of `op` will read from memory that other code may share; `stack` has its arguments.
void note_checksums(const Tape& tape, RecordedOp& op, const torch::jit::Stack& stack);
// Raises if these hashes have changed: a write that no version counter shows has happened since.
void check_checksums(const Tape& tape, const RecordedOp& op);

}  // namespace drivetrain::budget
