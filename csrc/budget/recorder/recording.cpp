// Records operations, their arguments and their results; see recording.h.
#include "budget/recorder/recording.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/hash.h"
#include "budget/recorder/arguments.h"
#include "budget/recorder/read_checks.h"

namespace drivetrain::budget {
namespace {

// Returns whether the tensor was computed and is not a view of a parameter.
bool is_computed(const at::Tensor& tensor) { return (tensor.is_view() ? tensor._base() : tensor).grad_fn() != nullptr; }

constexpr int64_t kParts = 6;     // of the budget
constexpr int32_t kRejoined = 8;  // operations as planned in a row, after which a pass is on its plan again

}  // namespace

Recording::Recording(Tape& tape, ValueStore& store, Profile* profile, bool notes_checksums)
    : tape_(tape), store_(store), profile_(profile), notes_checksums_(notes_checksums), cursor_(tape.plan.get()) {
  if (!tape_.plan) return;
  tape_.op_of_planned.assign(tape_.plan->ops.size(), -1);
  size_t num_values = 0;
  for (const PlannedOp& op : tape_.plan->ops) num_values += op.formats.size();
  tape_.values.reserve(num_values);
  tape_.ops.reserve(tape_.plan->ops.size());
  known_.reserve(num_values);
}

// ---- Values

int32_t Recording::add_value(const at::Tensor& tensor, int32_t op, bool can_recompute) {
  const auto value = static_cast<int32_t>(tape_.values.size());
  Value& made = tape_.values.emplace_back();
  made.op = op;
  made.number = next_number_++;
  made.bytes = static_cast<int64_t>(tensor.storage().nbytes());
  made.version = tensor._version();
  made.can_recompute = made.is_replayable = can_recompute;
  made.is_recorded = op >= 0;
  known_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(),
                          KnownStorage{tensor.storage().getWeakStorageImpl(), value});
  return value;
}

// Returns the value that the tensor views; -1: it existed before the pass. is_new: if the storage is unknown, the pass
// has made it without the recorder seeing how.
int32_t Recording::value_of(const at::Tensor& tensor, bool is_new) {
  const auto found = known_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == known_.end()) {
    if (is_new) {
      const int32_t value = add_value(tensor, -1, false);
      hold_for_profile(value, tensor);
      return value;
    }
    known_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(),
                            KnownStorage{tensor.storage().getWeakStorageImpl(), -1});
    return -1;
  }
  const int32_t value = found->second.value;
  if (value < 0 || tape_.values[value].has_independent_versions || tape_.values[value].version == tensor._version()) {
    return value;
  }
  add_unseen_write(value, tensor);
  return known_.at(tensor.storage().unsafeGetStorageImpl()).value;
}

int32_t Recording::value_of_argument(const at::Tensor& tensor) {
  const int32_t value = value_of(tensor, is_computed(tensor));
  const int32_t number = value < 0 ? -1 : tape_.values[value].number;
  arguments_ = mix(arguments_, static_cast<uint64_t>(number) << 1 | static_cast<uint64_t>(tensor.requires_grad()));
  return value;
}

// Replaces a value with a new one, because code that the recorder does not see has written to its memory.
void Recording::add_unseen_write(int32_t before, const at::Tensor& tensor) {
  protect(before);
  const int32_t value = add_value(tensor, -1, false);
  tape_.values[value].replaces = before;
  tape_.values[before].is_overwritten = true;
  hold_for_profile(value, tensor);
}

// Prepares a value for a write to its memory: lets go of it if it can be replayed, otherwise copies it.
void Recording::protect(int32_t index) {
  Value& value = tape_.values[index];
  if (value.offloaded) store_.restore(index);  // its copy to the host still reads the memory
  if (!value.held.defined() || value.is_overwritten || value.has_independent_versions) return;
  if (value.is_replayable && profile_ == nullptr) {
    store_.let_go(index);
    return;
  }
  if (value.held._version() != value.held_version) return;  // it was overwritten already, and take() will raise
  value.held = copy_of(value.held);
  value.held_version = value.held._version();
}

// Notes that views of the value count writes separately from now on, so that a later read may see any version.
void Recording::separate_versions(int32_t index) {
  protect(index);
  tape_.values[index].has_independent_versions = true;
}

void Recording::mark_unrecorded(int32_t value, const at::Tensor& tensor) {
  Value& made = tape_.values[value];
  made.can_recompute = made.is_replayable = made.is_uninitialized = made.is_recorded = false;
  hold_for_profile(value, tensor);
}

// Holds a value that cannot be replayed: re-executing the operations that read it needs it.
void Recording::hold_for_profile(int32_t value, const at::Tensor& tensor) {
  if (profile_ != nullptr) store_.hold(value, tensor);
}

// ---- Operations

void Recording::record(const c10::OperatorHandle& handle, const OpTraits& traits, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  forget_running_op();  // one that failed leaves entries
  saving_op_ = static_cast<int32_t>(tape_.ops.size());
  // A pass with fewer bytes outside of the plan keeps the budget without parts, and recomputes less.
  if (!detour_ && unplanned_bytes_ > part_bytes()) detour_.emplace(tape_, store_, part_bytes());
  if (!traits.is_view) begin_op_in_parts(handle, *stack);
  arguments_ = mix(traits.identity, static_cast<uint64_t>(c10::GradMode::is_enabled()));
  RecordedOp op(handle, traits, keys, module_);
  if (!traits.is_view) op.planned = cursor_.find(traits.name);
  const PlannedOp* planned = op.planned < 0 ? nullptr : &tape_.plan->ops[op.planned];
  const bool may_be_replayed = !traits.is_view && (planned == nullptr || planned->is_replayed || detour_);
  if (may_be_replayed || traits.changes_arguments()) {
    record_arguments(op, *stack, may_be_replayed);
    if (notes_checksums_ && may_be_replayed && tape_.plan) note_checksums(tape_, op, *stack);
  } else {
    note_arguments(handle, *stack, traits.is_view);
  }
  std::vector<at::Tensor> communicated;  // a collective may write all of its arguments, whatever its schema declares
  if (traits.is_collective) {
    for (const c10::IValue& argument : torch::jit::last(*stack, handle.schema().arguments().size())) {
      for_each_tensor(argument, [&](const at::Tensor& tensor, int32_t) { communicated.push_back(tensor); });
    }
  }
  op.arguments = arguments_;
  run(handle, keys, stack);
  for (const at::Tensor& tensor : communicated) {
    const int32_t value = is_plain(tensor) ? value_of(tensor, false) : -1;
    if (value >= 0) add_unseen_write(value, tensor);
  }
  if (traits.is_view && unresolved_.empty()) return;
  // A write through another view of such a value would not be seen, so a replay might read a later version.
  const bool reads_chunks = std::any_of(op.reads.begin(), op.reads.end(),
                                        [&](int32_t read) { return tape_.values[read].has_independent_versions; });
  const bool can_recompute = may_be_replayed && op.can_replay() && !reads_chunks;
  record_results(std::move(op), can_recompute, stack);
  resolve_saved();
  forget_running_op();
}

void Recording::forget_running_op() {
  written_.clear();
  anchors_.clear();
  memory_.clear();
  unresolved_.clear();
}

void Recording::run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  is_running_ = true;
  try {
    op.redispatchBoxed(keys & kBelowRecorder, stack);
  } catch (...) {
    is_running_ = false;
    forget_running_op();
    throw;
  }
  is_running_ = false;
}

// ---- Results

void Recording::record_results(RecordedOp op, bool can_recompute, torch::jit::Stack* stack) {
  const auto index = static_cast<int32_t>(tape_.ops.size());
  const std::vector<at::Tensor> made = add_results(op, can_recompute, *stack);
  if (op.traits->separates_versions) {
    for (const int32_t read : op.reads) separate_versions(read);
  }
  if (op.writes.empty()) return;
  if (profile_ != nullptr && can_recompute && !profile_->repeats(op, index, made, memory_)) {
    can_recompute = false;
    for (const OpResult& result : op.writes) tape_.values[result.value].can_recompute = false;
  }
  if (profile_ == nullptr || can_recompute) {
    for (const auto& [value, tensor] : anchors_) {
      if (detour_ && detour_->is_of_earlier_part(tape_.values[value]) && tape_.values[value].is_replayable) {
        detour_->note_read(value, tensor);
      } else {
        store_.hold(value, tensor);
      }
    }
  }
  if (profile_ != nullptr && can_recompute) note_reads_in_profile(op);
  mark_replayable(op, can_recompute);
  if (!can_recompute) op.forget_arguments();
  tape_.ops.push_back(std::move(op));
  apply_plan(index);
  for (size_t i = 0; i < made.size(); ++i) {
    const int32_t which = tape_.ops[index].writes[i].value;
    const Value& value = tape_.values[which];
    const bool profile_needs_it =
        profile_ != nullptr && !value.is_replayable && !value.is_uninitialized && !value.has_independent_versions;
    if (value.format >= kUnchanged || profile_needs_it) store_.store(which, made[i]);
  }
}

// Adds a value for each tensor that the operation wrote or returned. Returns these tensors, in the order of op.writes.
std::vector<at::Tensor> Recording::add_results(RecordedOp& op, bool can_recompute, const torch::jit::Stack& stack) {
  const auto index = static_cast<int32_t>(tape_.ops.size());
  std::vector<at::Tensor> made;
  size_t next_written = 0;
  for (const TensorRef& ref : op.refs) {
    if (!op.traits->writes[ref.arg]) continue;
    const at::Tensor& tensor = written_[next_written++];
    if (ref.value < 0 || !is_plain(tensor)) continue;
    const bool is_added = std::any_of(op.writes.begin(), op.writes.end(), [&](const OpResult& result) {
      return tape_.values[result.value].replaces == ref.value;
    });
    if (is_added) continue;
    const int32_t value = add_value(tensor, index, can_recompute);
    tape_.values[value].replaces = ref.value;
    op.writes.push_back({value, true, ref.arg, ref.element});
    made.push_back(tensor);
  }
  const size_t num_returns = op.handle.schema().returns().size();
  for (size_t i = 0; i < num_returns; ++i) {
    for_each_tensor(stack[stack.size() - num_returns + i], [&](const at::Tensor& tensor, int32_t element) {
      if (!is_plain(tensor)) return;
      if (known_.count(tensor.storage().unsafeGetStorageImpl()) != 0) return;  // a view
      // Unrecorded code may write the values that the memory held in an earlier step. A copy of it would then look
      // complete. It counts as a write, which must come before the value is added.
      if (profile_ != nullptr && op.traits->returns_garbage && !op.traits->writes_any) {
        Profile::fill_with_garbage(tensor);
      }
      const int32_t value = add_value(tensor, index, can_recompute);
      tape_.values[value].is_uninitialized = op.traits->is_uninitialized;
      op.writes.push_back({value, false, static_cast<int32_t>(i), element});
      made.push_back(tensor);
    });
  }
  return made;
}

void Recording::mark_replayable(const RecordedOp& op, bool can_recompute) {
  bool has_all = can_recompute;
  for (const int32_t read : op.reads) {
    const Value& value = tape_.values[read];
    has_all = has_all && (value.is_replayable || store_.has(read));
  }
  for (const OpResult& result : op.writes) {
    Value& value = tape_.values[result.value];
    value.is_replayable = has_all;
    if (value.replaces < 0) continue;
    tape_.values[value.replaces].is_overwritten = true;
    if (tape_.values[value.replaces].has_independent_versions) {
      value.can_recompute = value.is_replayable = value.is_recorded = false;
      value.has_independent_versions = true;
    }
  }
}

// Gives the values that an operation wrote their planned formats, or notes that the pass has left the plan.
void Recording::apply_plan(int32_t index) {
  if (!tape_.plan) return;
  RecordedOp& op = tape_.ops[index];
  const std::vector<PlannedOp>& plan = tape_.plan->ops;
  if (op.planned >= 0 && plan[op.planned].formats.size() != op.writes.size()) op.planned = -1;
  if (divergence_.empty() && op.planned != cursor_.next()) {
    const bool has_ended = static_cast<size_t>(cursor_.next()) >= plan.size();
    divergence_ = text("operation ", index + 1, " is ", op.traits->name, ", the plan ",
                       has_ended ? "ends before it" : "has " + plan[cursor_.next()].name);
  }
  cursor_.advance(op.planned, op.traits->name);
  num_as_planned_ = is_as_planned(op) ? num_as_planned_ + 1 : 0;
  if (op.planned < 0) {
    next_number_ -= static_cast<int32_t>(op.writes.size());
    for (const OpResult& result : op.writes) tape_.values[result.value].number = -2 - result.value;
    return;
  }
  const PlannedOp& planned = plan[op.planned];
  tape_.op_of_planned[op.planned] = index;
  for (size_t i = 0; i < op.writes.size(); ++i) {
    Value& value = tape_.values[op.writes[i].value];
    const int8_t format = planned.formats[i];
    // A loop that repeats more often would otherwise store more each time.
    const bool is_kept = format >= kUnchanged && format != kOnHost;
    value.format = detour_ && is_kept && value.is_replayable && !has_room_for(value) ? kUnplanned : format;
    if (value.format >= kUnchanged && num_as_planned_ >= kRejoined) {
      unplanned_bytes_ -= std::min(unplanned_bytes_, value.bytes);  // replays of these end at it
    }
    value.number = planned.numbers[i];
    next_number_ = value.number + 1;
    if (i < planned.prefetches.size()) value.prefetches = &planned.prefetches[i];
  }
}

// ---- Operations that the plan lacks

// Returns whether an operation of another path needs this value held to be replayed, as no replay would provide it.
// Also holds values that are read again later, such as the input of a residual block, where no plan holds such values.
bool Recording::needs_anchor(int32_t index) const {
  constexpr int32_t kLater = 4;  // operations
  const Value& value = tape_.values[index];
  if (divergence_.empty() || value.has_independent_versions || value.is_uninitialized || store_.has(index)) {
    return false;
  }
  const bool is_read_again =
      value.number < -1 && value.is_read && static_cast<int32_t>(tape_.ops.size()) - value.op > kLater;
  if (!value.is_replayable) return true;
  return detour_ ? (is_read_again && has_room_for(value)) || detour_->is_of_earlier_part(value) : is_read_again;
}

// Returns whether it has matched a planned operation that has the same arguments.
bool Recording::is_as_planned(const RecordedOp& op) const {
  return op.planned >= 0 && tape_.plan->ops[op.planned].arguments == op.arguments;
}

// Returns the bytes of a part of a pass that has left its plan. Larger parts leave less of the budget for what the plan
// stores, and smaller ones have more inputs to hold.
int64_t Recording::part_bytes() const { return tape_.shared->budget_bytes / kParts; }

// Returns whether a replayable value may be stored. A pass that has left its plan stores no more than the plan does up
// to the same operation, and what the budget leaves.
bool Recording::has_room_for(const Value& value) const {
  if (divergence_.empty()) return true;
  const std::vector<PlannedOp>& plan = tape_.plan->ops;
  int64_t most = plan.empty() ? 0 : plan[std::max(cursor_.next() - 1, 0)].most_bytes;
  if (detour_) most = std::min(most, (kParts - 3) * part_bytes());  // two for what parts hold, one for a replay
  return store_.bytes() + value.bytes <= most;
}

// ---- Saved tensors

void Recording::save(const std::shared_ptr<SavedTensor>& saved, const at::Tensor& tensor) {
  if (is_running_) {
    // The tensor may be a result that has no value yet, or an argument that the operation is about to write. For
    // example, autograd saves the noise of rrelu_with_noise before the operation writes it.
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    const auto found = known_.find(storage);
    const bool is_known = found != known_.end() &&
                          (found->second.value < 0 || tape_.values[found->second.value].version == tensor._version());
    const bool is_written = std::any_of(written_.begin(), written_.end(), [&](const at::Tensor& written) {
      return is_plain(written) && written.storage().unsafeGetStorageImpl() == storage;
    });
    if (!is_known || is_written) {
      unresolved_.push_back({saved, alias_of(tensor), is_known ? std::optional(tensor._version()) : std::nullopt});
      return;
    }
  }
  resolve(*saved, tensor);
}

void Recording::resolve_saved() {
  for (const Unresolved& unresolved : std::exchange(unresolved_, {})) {
    const auto saved = unresolved.saved.lock();
    if (!saved) continue;
    if (!unresolved.version || *unresolved.version == unresolved.tensor._version()) {
      resolve(*saved, unresolved.tensor);
      continue;
    }
    describe(unresolved.tensor, saved->ref);  // the saved version is lost: take() will raise
    saved->ref.version = *unresolved.version;
    saved->ref.direct = unresolved.tensor;
  }
}

void Recording::resolve(SavedTensor& saved, const at::Tensor& tensor) {
  const bool is_parameter = tensor.is_leaf() && tensor.requires_grad();
  describe(tensor, saved.ref);
  saved.ref.value = value_of(tensor, !is_parameter);
  if (profile_ != nullptr) profile_->note_save(saving_op_, saved.ref.value);
  if (saved.ref.value < 0) {
    saved.ref.direct = alias_of(tensor);
    return;
  }
  Value& value = tape_.values[saved.ref.value];
  ++value.num_saved;
  if (value.is_uninitialized) mark_unrecorded(saved.ref.value, tensor);
  if (value.is_replayable) {
    const bool is_stored = profile_ != nullptr ? profile_->stores_saved(saved.ref.value, tensor)
                                               : value.format != kRecomputed && has_room_for(value);
    if (!is_stored) {
      if (detour_) detour_->note_save(saved.ref.value);
      if (!divergence_.empty() && !is_as_planned(tape_.ops[value.op])) unplanned_bytes_ += value.bytes;
      return;
    }
  }
  store_.store(saved.ref.value, tensor);
}

void Recording::finish() {
  forget_running_op();
  // The recorder saw every write to memory that is still being copied to the host. After this call other code, for
  // instance the owner of a result of the model, may write there unseen.
  for (const auto& [_, known] : known_) {
    if (known.value >= 0 && !known.storage.expired()) store_.await_copy_out(known.value);
  }
  known_.clear();
}

}  // namespace drivetrain::budget
