// Compares the values that a replay reads with the forward pass's values; see read_checks.h.
#include "budget/recorder/read_checks.h"

#include "base/check.h"
#include "base/torch_text.h"
#include "budget/recorder/arguments.h"
#include "recompute/region.h"

namespace drivetrain::budget {
namespace {

// Describes a tensor that an operation reads, for errors.
std::string name_of(const Tape& tape, const RecordedOp& op, const TensorRef& ref) {
  const std::string shape = text(c10::IntArrayRef(ref.sizes), " ", ref.dtype);
  if (ref.value >= 0) {
    const int32_t made_by = tape.values[ref.value].op;
    return made_by < 0
               ? text("a tensor of ", shape, " that no recorded operation made")
               : text("the result of ", tape.ops[made_by].traits->name, tape.module_of(made_by), " (", shape, ")");
  }
  const std::string owner = tape.shared->model ? recompute::owner_in(*tape.shared->model, ref.direct) : "";
  if (!owner.empty()) return text(owner, " (", shape, ")");
  return text("a tensor of ", shape, " that the model was given (argument '",
              op.handle.schema().arguments()[ref.arg].name(), "')");
}

}  // namespace

at::Tensor existing(const TensorRef& ref) {
  if (is_freed(ref)) {
    recompute::throw_checkpoint_error(
        text("the memory of a tensor of ", c10::IntArrayRef(ref.sizes), " ", ref.dtype,
             " that the forward pass read was freed before backward reached the operations that need it. Usually FSDP "
             "reshards its parameters after forward: set reshard_after_forward=False, or leave that module without a "
             "budget."));
  }
  if (is_written(ref)) {
    recompute::throw_checkpoint_error(text(
        "a tensor of ", c10::IntArrayRef(ref.sizes), " ", ref.dtype,
        " that the forward pass read was modified in place before backward reached the operations that need it. It is "
        "a parameter, a buffer or an input, and gradients would belong to other values. Usually an optimizer "
        "stepped in between, or an input is reused: clone it, or write it after backward."));
  }
  return ref.direct;
}

void check_unwritten(const Tape& tape, const TensorRef& ref) {
  const Value& value = tape.values[ref.value];
  if (value.has_independent_versions || value.held._version() == value.held_version) return;
  recompute::throw_checkpoint_error(
      text("a tensor of ", c10::IntArrayRef(ref.sizes), " ", ref.dtype,
           " that backward needs was modified in place after the forward pass: gradients would belong to other values. "
           "Write to a clone of it, or use an operation that is not in place. Or call the code that writes to it "
           "inside `with plan:`, where the recorder sees writes."));
}

void note_checksums(const Tape& tape, RecordedOp& op, const torch::jit::Stack& stack) {
  const size_t begin = stack.size() - op.handle.schema().arguments().size();
  for (TensorRef& ref : op.refs) {
    if (op.traits->writes[ref.arg] && op.traits->only_writes) continue;
    if (ref.value < 0 && !ref.direct.defined()) continue;
    if (ref.value >= 0) {
      const Value& value = tape.values[ref.value];
      const bool will_be_recomputed = value.format >= kAsBits || (value.format == kRecomputed && value.is_replayable);
      if (will_be_recomputed || value.has_independent_versions || value.is_uninitialized) continue;
    }
    ref.checksum = hash_of_elements(tensor_in(stack[begin + ref.arg], ref.element));
  }
}

void check_checksums(const Tape& tape, const RecordedOp& op) {
  for (const TensorRef& ref : op.refs) {
    if (!ref.checksum) continue;
    const bool is_value = ref.value >= 0;
    if (is_value && (tape.values[ref.value].is_recomputed || tape.values[ref.value].has_independent_versions)) {
      continue;
    }
    const at::Tensor read = is_value ? view_of(tape.values[ref.value].held, ref) : existing(ref);
    if (hash_of_elements(read) == ref.checksum) continue;
    recompute::throw_checkpoint_error(text(
        name_of(tape, op, ref), ", which ", op.traits->name,
        tape.module_of(static_cast<int32_t>(&op - tape.ops.data())),
        " read in the forward pass, has other values when backward recomputes that operation. No version counter shows "
        "a write, and gradients would belong to other values. Usually x.numpy(), DLPack or a custom operator shared "
        "its memory with code that reuses it: write to a clone, or after backward."));
  }
}

}  // namespace drivetrain::budget
