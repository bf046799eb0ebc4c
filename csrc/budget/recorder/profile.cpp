// Re-executes operations, and compares and times their results; see profile.h.
#include "budget/recorder/profile.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/check.h"

namespace drivetrain::budget {
namespace {

constexpr int64_t kSmallestOffload = 1 << 16;  // the start of a copy dominates the time of smaller ones

}  // namespace

Profile::Profile(Tape& tape, ValueStore& store, const Replay& replay, const ReadChecks& checks,
                 std::shared_ptr<MemoryTracker> tracker)
    : tape_(tape),
      store_(store),
      replay_(replay),
      checks_(checks),
      tracker_(std::move(tracker)),
      begin_(tracker_->num_uses()) {}

std::unique_ptr<Profile> Profile::make(RecordingPurpose purpose, Tape& tape, ValueStore& store, const Replay& replay,
                                       const ReadChecks& checks, std::shared_ptr<MemoryTracker> tracker) {
  switch (purpose) {
    case RecordingPurpose::kPlan:
      break;
    case RecordingPurpose::kProfile:
      return std::unique_ptr<Profile>(new ForwardProfile(tape, store, replay, checks, std::move(tracker)));
    case RecordingPurpose::kFrugalProfile:
      return std::unique_ptr<Profile>(new FrugalProfile(tape, store, replay, checks, std::move(tracker)));
    case RecordingPurpose::kTimings:
      return std::unique_ptr<Profile>(new BackwardProfile(tape, store, replay, checks, std::move(tracker)));
  }
  return nullptr;
}

void Profile::fill_with_garbage(const at::Tensor& tensor) {
  constexpr uint8_t kGarbage = 0xFF;  // NaN in every floating-point dtype
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  const at::NoGradGuard no_grad;
  bytes_of(tensor).fill_(kGarbage);
}

void Profile::note_take(int32_t value) { uses_.push_back({value, false, tracker_->next_use()}); }

void Profile::note_release(int32_t value) { uses_.push_back({value, true, tracker_->next_use()}); }

std::vector<at::Tensor> Profile::reexecute(int32_t index, const std::function<const at::Tensor&(int32_t)>& memory_of,
                                           const std::function<bool(int32_t)>& takes_over) {
  RecordedOp& op = tape_.ops[index];
  std::optional<DeviceTimer> timer;
  if (op.refs.empty()) {
    const auto device = std::find_if(op.args.begin(), op.args.end(), [](const auto& arg) { return arg.isDevice(); });
    timer.emplace(device == op.args.end() ? c10::Device(c10::kCPU) : device->toDevice());
  }
  const std::unordered_map<int32_t, at::Tensor> written =
      Replay::writable(op, [&](int32_t read) { return takes_over(read) ? memory_of(read) : copy_of(memory_of(read)); });
  std::vector<at::Tensor> results = replay_.call(op, [&](const TensorRef& ref) {
    const auto found = written.find(ref.value);
    const at::Tensor tensor = ref.value < 0            ? checks_.existing(ref)
                              : found != written.end() ? view_of(found->second, ref)
                                                       : view_of(memory_of(ref.value), ref);
    if (&ref == &op.refs.back()) timer.emplace(tensor.device());  // after the copies, which a replay may not make
    return tensor;
  });
  if (timer) {
    timer->stop();
    timers_.emplace_back(index, std::move(*timer));
  }
  if (op.traits->returns_garbage) {
    for (const at::Tensor& result : results) fill_with_garbage(result);
  }
  bool is_same = true;
  for (size_t k = 0; k < op.writes.size(); ++k) {
    const Value& value = tape_.values[op.writes[k].value];
    if (value.is_uninitialized || value.has_independent_versions) continue;
    if (op.traits->has_workspace && results[k].scalar_type() == at::kByte) continue;  // never fully written
    is_same = is_same && has_saved_bits(value, results[k]);
  }
  for (size_t k = 0; k < op.writes.size(); ++k) {
    Value& value = tape_.values[op.writes[k].value];
    value.can_recompute = value.can_recompute && is_same;
    if (value.hash) measure_formats(op.writes[k].value, results[k]);
    if (!is_same && value.held.defined()) results[k] = value.held;
  }
  return results;
}

bool Profile::can_reexecute(const RecordedOp& op) const {
  return op.can_replay() && std::all_of(op.refs.begin(), op.refs.end(), [&](const TensorRef& ref) {
           if (ref.value < 0) return !is_freed(ref) && !is_written(ref);
           const Value& value = tape_.values[ref.value];
           return !value.held.defined() || value.has_independent_versions ||
                  value.held._version() == value.held_version;
         });
}

// Compares a result with what autograd saved. A value that was not saved has nothing to compare.
bool Profile::has_saved_bits(const Value& value, const at::Tensor& tensor) const {
  if (!value.held.defined() && !value.hash) return true;
  const bool is_same =
      value.held.defined() ? have_equal_storages(tensor, value.held) : *value.hash == hash_of_storage(tensor);
  // Equal zeros prove nothing: unseen code, such as a reduction over ranks, may add to them in another step.
  return is_same && (tensor.storage().nbytes() == 0 || !is_all_zero(tensor));
}

void Profile::measure_formats(int32_t index, const at::Tensor& tensor) {
  Value& value = tape_.values[index];
  if (value.is_overwritten || value.has_independent_versions || value.num_saved == 0) return;
  if (!value.can_recompute || value.is_uninitialized) return;
  const StorageFormats& formats = store_.formats();
  for (const int8_t format : formats.tried) {
    DeviceTimer timer(tensor.device());
    int64_t bytes = 0;
    if (format == kOnHost) {
      if (!formats.pool || value.bytes < kSmallestOffload) continue;
      saved_tensors::Offloaded::begin(formats.pool, bytes_of(tensor)).take();
    } else {
      const saved_tensors::Packing packing = packing_of(format);
      if (!saved_tensors::is_packable(tensor.scalar_type(), packing) || value.bytes % tensor.itemsize() != 0) continue;
      const std::optional<saved_tensors::Packed> packed = saved_tensors::pack(flat_of(tensor, tensor.dtype()), packing);
      if (!packed) continue;
      bytes = packed->nbytes();
      saved_tensors::unpack(*packed);
    }
    timer.stop();
    if (bytes < value.bytes) value.format_costs.push_back({format, bytes, timer.seconds()});
  }
}

void ForwardProfile::measure_after_forward() {
  const recompute::RandomStates states = recompute::RandomStates::now();
  const recompute::RandomStatesGuard random_states(&states);
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  const at::NoGradGuard no_grad;
  std::vector<Value>& values = tape_.values;
  std::vector<int32_t> last_reader(values.size(), -1);
  for (size_t i = 0; i < tape_.ops.size(); ++i) {
    for (const int32_t read : tape_.ops[i].reads) last_reader[read] = static_cast<int32_t>(i);
  }
  std::vector<at::Tensor> fresh(values.size());
  for (size_t i = 0; i < tape_.ops.size(); ++i) {
    const RecordedOp& op = tape_.ops[i];
    bool can_call = can_reexecute(op);
    for (const int32_t read : op.reads) {
      if (!fresh[read].defined() && values[read].held.defined() && !values[read].has_independent_versions) {
        fresh[read] = values[read].held;
      }
      can_call = can_call && fresh[read].defined();
    }
    if (!can_call) {
      for (const OpResult& result : op.writes) values[result.value].can_recompute = false;
      continue;
    }
    const auto is_last = [&](int32_t read) { return last_reader[read] == static_cast<int32_t>(i); };
    const std::vector<at::Tensor> results = reexecute(
        static_cast<int32_t>(i), [&](int32_t read) -> const at::Tensor& { return fresh[read]; },
        [&](int32_t read) { return is_last(read) && !values[read].held.defined(); });
    for (size_t k = 0; k < op.writes.size(); ++k) {
      if (last_reader[op.writes[k].value] >= 0) fresh[op.writes[k].value] = results[k];
    }
    for (const int32_t read : op.reads) {
      if (is_last(read)) fresh[read].reset();
    }
  }
  for (size_t value = 0; value < values.size(); ++value) {
    if (values[value].held.defined()) measure_formats(static_cast<int32_t>(value), values[value].held);
  }
}

bool FrugalProfile::stores_saved(Value& value, const at::Tensor& tensor) {
  value.hash = hash_of_storage(tensor);
  return false;
}

void BackwardProfile::note_take(int32_t value) {
  Profile::note_take(value);
  time_recomputation(value);
}

// Returns the operations that recomputing a value calls, in the order of the forward pass. Returns nothing if it cannot
// be recomputed, or if one of them has been called often enough: many values may share operations.
std::vector<int32_t> BackwardProfile::ops_to_reexecute(int32_t value) const {
  constexpr uint8_t kMostCalls = 2;
  std::set<int32_t> ops;
  std::vector<int32_t> todo{value};
  while (!todo.empty()) {
    const int32_t next = todo.back();
    todo.pop_back();
    const int32_t index = tape_.values[next].op;
    if (index < 0 || !tape_.values[next].can_recompute || num_calls_[index] == kMostCalls) return {};
    if (ops.count(index) != 0) continue;
    if (!can_reexecute(tape_.ops[index])) return {};
    ops.insert(index);
    for (const int32_t read : tape_.ops[index].reads) {
      if (tape_.values[read].has_independent_versions) return {};
      if (!tape_.values[read].held.defined()) todo.push_back(read);
    }
  }
  return {ops.begin(), ops.end()};
}

void BackwardProfile::time_recomputation(int32_t value) {
  num_calls_.resize(tape_.ops.size());
  if (tape_.values[value].op >= 0 && num_calls_[tape_.values[value].op] > 0) return;
  const std::vector<int32_t> ops = ops_to_reexecute(value);
  if (ops.empty()) return;  // the common case, which skips the copy of the random states
  const recompute::RandomStates states = recompute::RandomStates::now();
  const recompute::RandomStatesGuard random_states(&states);
  const at::NoGradGuard no_grad;
  std::unordered_map<int32_t, int32_t> last_reader;
  for (const int32_t index : ops) {
    for (const int32_t read : tape_.ops[index].reads) last_reader[read] = index;
  }
  std::unordered_map<int32_t, at::Tensor> fresh;
  for (const int32_t index : ops) {
    ++num_calls_[index];
    const RecordedOp& op = tape_.ops[index];
    const std::vector<at::Tensor> results = reexecute(
        index,
        [&](int32_t read) -> const at::Tensor& {
          const auto found = fresh.find(read);
          return found == fresh.end() ? tape_.values[read].held : found->second;
        },
        [](int32_t) { return false; });
    for (size_t k = 0; k < op.writes.size(); ++k) {
      if (last_reader.count(op.writes[k].value) != 0) fresh.insert_or_assign(op.writes[k].value, results[k]);
    }
    for (const int32_t read : op.reads) {
      if (last_reader.at(read) == index) fresh.erase(read);
    }
  }
}

}  // namespace drivetrain::budget
