// Calls operations again, compares and times their results, and chooses what a profile holds; see profile.h.
#include "budget/recorder/profile.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <string_view>

#include "base/hash.h"
#include "budget/recorder/read_checks.h"
#include "recompute/ambient.h"

namespace drivetrain::budget {
namespace {

constexpr int64_t kFirstPart = 1 << 16;        // bytes
constexpr int64_t kSmallestOffload = 1 << 16;  // the start of a copy dominates the time of smaller ones

// Hashes an argument without tensors. Types other than numbers, strings and lists of them contribute only their kind.
uint64_t hash_of_setting(const c10::IValue& value) {
  const uint64_t hash = std::hash<std::string>()(value.tagKind());
  if (value.isInt()) return mix(hash, static_cast<uint64_t>(value.toInt()));
  if (value.isBool()) return mix(hash, static_cast<uint64_t>(value.toBool()));
  if (value.isDouble()) return mix(hash, std::bit_cast<uint64_t>(value.toDouble()));
  if (value.isString()) return mix(hash, std::hash<std::string_view>()(value.toStringView()));
  if (!value.isList()) return hash;
  uint64_t of_all = hash;
  for (const c10::IValue& element : value.toListRef()) of_all = mix(of_all, hash_of_setting(element));
  return of_all;
}

// Returns a number that is equal for operations that do the same work: same operator, settings, shapes and dtypes.
uint64_t kind_of(const RecordedOp& op) {
  uint64_t kind = mix(op.traits->identity, op.args.size());
  for (const c10::IValue& arg : op.args) kind = mix(kind, hash_of_setting(arg));
  for (const TensorRef& ref : op.refs) {
    kind = mix(mix(kind, static_cast<uint64_t>(ref.arg)), static_cast<uint64_t>(c10::typeMetaToScalarType(ref.dtype)));
    for (const c10::DimVector* dims : {&ref.sizes, &ref.strides}) {
      for (const int64_t dim : *dims) kind = mix(kind, static_cast<uint64_t>(dim));
    }
  }
  return kind;
}

// Returns whether a result is a workspace, which is never fully written.
bool is_workspace(const RecordedOp& op, const at::Tensor& result) {
  return op.traits->has_workspace && result.scalar_type() == at::kByte;
}

}  // namespace

Profile::Profile(Tape& tape, ValueStore& store)
    : tape_(tape), store_(store), begin_(tape.shared->tracker.counts().num_uses), parts_(tape, store, kFirstPart) {}

void Profile::fill_with_garbage(const at::Tensor& tensor) {
  constexpr uint8_t kGarbage = 0xFF;  // NaN in every floating-point dtype
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  const at::NoGradGuard no_grad;
  bytes_of(tensor).fill_(kGarbage);
}

// ---- Forward

bool Profile::repeats(RecordedOp& op, int32_t index, const std::vector<at::Tensor>& made, const Memory& memory) {
  op.kind = kind_of(op);
  if (tape_.shared->unrepeatable.count(op.kind) != 0 || op.has_changed_inputs()) return false;
  const recompute::RandomStates states = recompute::RandomStates::now();
  const recompute::RandomStatesGuard random_states(&states);
  std::optional<DeviceTimer> timer;
  std::vector<at::Tensor> results;
  const auto tensor_of = [&](const TensorRef& ref) {
    return ref.value < 0 ? existing(ref) : view_of(memory.at(ref.value), ref);
  };
  try {
    results = op.call(tensor_of, &timer);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
    return false;  // it cannot be called twice
  }
  forward_timers_.emplace_back(index, std::move(*timer));
  for (size_t k = 0; k < op.writes.size(); ++k) {
    const Value& value = tape_.values[op.writes[k].value];
    if (value.is_uninitialized || value.has_independent_versions) continue;
    if (is_workspace(op, results[k])) continue;
    if (!have_equal_storages(results[k], made[k])) return false;
  }
  return true;
}

bool Profile::stores_saved(int32_t index, const at::Tensor& tensor) {
  Value& value = tape_.values[index];
  // Equal zeros prove nothing: unseen code, such as a reduction over ranks, may add to them in another step.
  if (tensor.storage().nbytes() > 0 && is_all_zero(tensor)) {
    value.can_recompute = value.is_replayable = false;
    parts_.keep(index);
    return true;
  }
  if (!value.hash) value.hash = hash_of_storage(tensor);
  parts_.note_save(index);
  return false;
}

// ---- Backward

void Profile::note_replay(int32_t index, DeviceTimer timer, const std::vector<at::Tensor>& results) {
  backward_timers_.emplace_back(index, std::move(timer));
  const RecordedOp& op = tape_.ops[index];
  for (size_t k = 0; k < op.writes.size(); ++k) {
    const int32_t value = op.writes[k].value;
    if (op.traits->returns_garbage) fill_with_garbage(results[k]);
    if (!tape_.values[value].hash || store_.has(value)) continue;
    if (is_workspace(op, results[k])) continue;
    if (*tape_.values[value].hash == hash_of_storage(results[k])) continue;
    has_failed_ = true;
    tape_.shared->unrepeatable.insert(op.kind);
  }
}

void Profile::note_changed_inputs() {
  for (const RecordedOp& op : tape_.ops) {
    if (!op.has_changed_inputs()) continue;
    has_failed_ = true;
    tape_.shared->unrepeatable.insert(op.kind);
  }
}

void Profile::measure_formats(int32_t index) {
  Value& value = tape_.values[index];
  if (std::exchange(value.has_format_costs, true)) return;
  if (value.is_overwritten || value.has_independent_versions || !value.can_recompute || value.is_uninitialized) return;
  const at::Tensor& tensor = value.held;
  const std::shared_ptr<saved_tensors::HostPool>& pool = tape_.shared->pool;
  for (const int8_t format : tape_.shared->tried_formats) {
    DeviceTimer timer(tensor.device());
    int64_t bytes = 0;
    if (format == kOnHost) {
      if (!pool || value.bytes < kSmallestOffload) continue;
      saved_tensors::Offloaded::begin(pool, bytes_of(tensor)).take();
    } else {
      const saved_tensors::Packing packing = packing_of(format);
      if (!saved_tensors::is_packable(tensor.scalar_type(), packing) || value.bytes % tensor.itemsize() != 0) continue;
      const std::optional<saved_tensors::Packed> packed = saved_tensors::pack(flat_of(tensor, tensor.dtype()), packing);
      if (!packed) continue;
      bytes = packed->nbytes();
      saved_tensors::unpack(*packed);
    }
    timer.stop();
    if (bytes < value.bytes) value.format_costs.emplace_back(format, bytes, timer.seconds());
  }
}

// ---- The trace

std::vector<ValueTrace> Profile::value_traces() const {
  std::vector<ValueTrace> traces;
  for (const Value& value : tape_.values) {
    // An overwritten value that cannot be recomputed is copied before the write, so it can be kept.
    traces.emplace_back(value.bytes, !value.is_overwritten || !value.can_recompute, value.can_recompute, value.replaces,
                        value.format_costs);
  }
  return traces;
}

// Gives each operation the median time of its kind. Differences within a kind are mostly noise, which must not
// influence the solver's choice. By the time of backward the inputs have left the caches, as under a plan.
std::vector<OpTrace> Profile::op_traces() const {
  std::unordered_map<uint64_t, std::vector<double>> seconds_of;
  for (const auto* timers : {&backward_timers_, &forward_timers_}) {
    std::unordered_map<uint64_t, std::vector<double>> found;
    for (const auto& [op, timer] : *timers) found[tape_.ops[op].kind].push_back(timer.seconds());
    for (auto& [kind, seconds] : found) {
      std::sort(seconds.begin(), seconds.end());
      seconds_of.try_emplace(kind, std::move(seconds));
    }
  }
  std::vector<OpTrace> traces;
  for (const RecordedOp& op : tape_.ops) {
    std::vector<int32_t> writes;
    for (const OpResult& result : op.writes) writes.push_back(result.value);
    const auto found = seconds_of.find(op.kind);
    std::optional<double> seconds;
    if (found != seconds_of.end()) seconds = found->second[found->second.size() / 2];
    traces.emplace_back(op.traits->name, op.module, seconds, op.reads, writes);
  }
  return traces;
}

std::vector<uint64_t> Profile::arguments() const {
  std::vector<uint64_t> hashes;
  for (const RecordedOp& op : tape_.ops) hashes.push_back(op.arguments);
  return hashes;
}

}  // namespace drivetrain::budget
