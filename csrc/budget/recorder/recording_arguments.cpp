// Records the arguments of operations, and the state that a replay must restore; see recording.h.
#include <algorithm>
#include <optional>
#include <utility>

#include "budget/recorder/arguments.h"
#include "budget/recorder/recorded_pass.h"
#include "budget/recorder/recording.h"

namespace drivetrain::budget {
namespace {

// Returns the only device of these arguments; none if there is no tensor, or another device may be used as well.
std::optional<c10::Device> only_device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  bool is_one = true;
  for (const c10::IValue& argument : arguments) {
    if (argument.isDevice()) return std::nullopt;
    for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t) {
      is_one = is_one && (!device || *device == tensor.device());
      device = tensor.device();
    });
  }
  return is_one ? device : std::nullopt;
}

}  // namespace

// Begins the operation in the parts of the pass, if it has parts.
void Recording::begin_op_in_parts(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (profile_ == nullptr && !detour_) return;
  int64_t read_bytes = 0;
  for (const c10::IValue& argument : torch::jit::last(stack, op.schema().arguments().size())) {
    for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t) {
      const auto found = is_plain(tensor) ? known_.find(tensor.storage().unsafeGetStorageImpl()) : known_.end();
      if (found != known_.end() && found->second.value >= 0) read_bytes += tape_.values[found->second.value].bytes;
    });
  }
  (profile_ != nullptr ? profile_->parts() : *detour_).begin_op(saving_op_, read_bytes);
}

// Records what the operation reads and writes, and, if may_be_replayed, all that a replay needs.
void Recording::record_arguments(RecordedOp& op, const torch::jit::Stack& stack, bool may_be_replayed) {
  const OpTraits& traits = *op.traits;
  const size_t num_args = op.handle.schema().arguments().size();
  op.args.reserve(num_args);
  for (size_t i = 0; i < num_args; ++i) {
    const c10::IValue& argument = stack[stack.size() - num_args + i];
    op.args.push_back(record_argument(op, static_cast<int32_t>(i), argument, traits.writes[i], may_be_replayed));
    if (!traits.writes[i]) continue;
    for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t) { written_.push_back(tensor); });
  }
  for (const TensorRef& ref : op.refs) {
    if (!traits.writes[ref.arg] && !traits.is_statistic(ref.arg)) continue;
    if (ref.value >= 0) {
      if (traits.writes[ref.arg]) protect(ref.value);
    } else if (ref.direct.defined()) {
      for (const auto& pass : tape_.shared->tracker.passes()) pass->preserve(ref.direct);
    }
  }
  if (may_be_replayed) record_ambient_state(op, stack);
}

void Recording::record_ambient_state(RecordedOp& op, const torch::jit::Stack& stack) {
  const OpTraits& traits = *op.traits;
  if (traits.is_batch_norm && op.args[5].toBool()) {
    std::erase_if(op.refs, [&](const TensorRef& ref) { return ref.value < 0 && traits.is_statistic(ref.arg); });
  }
  if (traits.is_random) {
    const std::optional<c10::Device> device =
        only_device_of(torch::jit::last(stack, op.handle.schema().arguments().size()));
    op.random_states = std::make_shared<const recompute::RandomStates>(device ? recompute::RandomStates::now_of(*device)
                                                                              : recompute::RandomStates::now());
  }
  // Entering or leaving autocast changes these keys, so the cached state holds as long as they stay.
  const std::pair keys_now(op.local_keys.included_, op.local_keys.excluded_);
  if (!autocast_ || autocast_keys_ != keys_now || !autocast_->has_default_dtype_of_now()) {
    autocast_ = std::make_shared<const recompute::Autocast>(recompute::Autocast::now());
    autocast_keys_ = keys_now;
  }
  op.autocast = autocast_;
}

c10::IValue Recording::record_argument(RecordedOp& op, int32_t arg, const c10::IValue& argument, bool is_written,
                                       bool may_be_replayed) {
  bool has_tensors = false;
  for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t element) {
    record_tensor(op, arg, element, tensor, is_written, may_be_replayed);
    has_tensors = true;
  });
  if (!has_tensors) return argument;
  if (argument.isTensor()) return {};
  const c10::impl::GenericList list = argument.toList();
  c10::impl::GenericList without_tensors(list.elementType());
  for (const c10::IValue& element : argument.toListRef()) {
    without_tensors.push_back(is_defined_tensor(element) ? c10::IValue() : element);
  }
  return without_tensors;
}

void Recording::record_tensor(RecordedOp& op, int32_t arg, int32_t element, const at::Tensor& tensor, bool is_written,
                              bool may_be_replayed) {
  TensorRef& ref = op.refs.emplace_back();
  ref.arg = arg;
  ref.element = element;
  ref.value = -1;
  if (!is_plain(tensor)) return;
  ref.value = value_of_argument(tensor);
  describe(tensor, ref);
  if (ref.value < 0) {
    ref.direct = alias_of(tensor);
    return;
  }
  const bool is_initialized_now = is_written && op.traits->only_writes && covers_its_storage(tensor);
  if (tape_.values[ref.value].is_uninitialized && !is_initialized_now) mark_unrecorded(ref.value, tensor);
  if (profile_ != nullptr) {
    at::Tensor& memory = memory_[ref.value];
    const bool is_copied = memory.defined() && !memory.is_alias_of(tensor);
    if (!is_copied) memory = is_written ? copy_of(tensor) : alias_of(tensor);
    const Value& value = tape_.values[ref.value];
    const bool is_needed = is_written && value.is_replayable && !value.has_independent_versions;
    if (is_needed && !value.is_uninitialized && profile_->parts().is_of_earlier_part(value)) {
      anchors_.emplace_back(ref.value, copy_of(tensor));
    }
  } else if (may_be_replayed && !is_written && needs_anchor(ref.value)) {
    // The previous contents of an argument that is written would have to be copied.
    anchors_.emplace_back(ref.value, alias_of(tensor));
  }
  tape_.values[ref.value].is_read = true;
  if (std::find(op.reads.begin(), op.reads.end(), ref.value) == op.reads.end()) op.reads.push_back(ref.value);
}

// Notes which values a replay of the operation will read. Values of earlier parts that it has written over are held.
void Recording::note_reads_in_profile(const RecordedOp& op) {
  for (const int32_t read : op.reads) {
    const Value& value = tape_.values[read];
    if (value.has_independent_versions || value.is_uninitialized || !value.is_replayable) continue;
    profile_->parts().note_read(read, memory_.at(read));
  }
}

// Registers the tensors among the arguments of an operation that will not be replayed.
void Recording::note_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack, bool is_view) {
  const size_t num_args = op.schema().arguments().size();
  for (size_t i = stack.size() - num_args; i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](const at::Tensor& tensor, int32_t) {
      const int32_t value = is_plain(tensor) ? value_of_argument(tensor) : -1;
      if (value >= 0 && !is_view) tape_.values[value].is_read = true;
    });
  }
}

void Recording::preserve(const at::Tensor& tensor) {
  at::Tensor copy;
  for (RecordedOp& op : tape_.ops) {
    for (TensorRef& ref : op.refs) {
      if (ref.value >= 0 || !ref.direct.defined() || op.traits->writes[ref.arg] ||
          ref.direct.storage().unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl() || is_written(ref)) {
        continue;
      }
      if (!copy.defined()) copy = copy_of(tensor);
      ref.direct = view_of(copy, ref);
      ref.version = ref.direct._version();
    }
  }
}

}  // namespace drivetrain::budget
