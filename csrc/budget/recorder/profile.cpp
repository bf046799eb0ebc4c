// What a tape of a profile finds out: what each operation takes when it is called again, and whether the same bits come
// out.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <set>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/hash.h"
#include "budget/recorder/stopwatch.h"
#include "budget/recorder/tape.h"

namespace drivetrain::budget {
namespace {

constexpr uint8_t kGarbage = 0xFF;             // not a number, as floating-point
constexpr int64_t kSmallestOffload = 1 << 16;  // below, a copy is mostly its start

// Of an argument without tensors; of some types, that it is one.
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

}  // namespace

// Calls an operation again, on what `memory_of` says is each value that it reads, and notes the time; `takes_over` says
// of which values it may write over the memory. What comes out with other bits than autograd saved is not to be
// forgotten.
std::vector<at::Tensor> Tape::rehearse_op(int32_t index, const std::function<const at::Tensor&(int32_t)>& memory_of,
                                          const std::function<bool(int32_t)>& takes_over) {
  Op& op = ops_[index];
  std::optional<Stopwatch> watch;
  if (op.refs.empty()) {
    const auto device = std::find_if(op.args.begin(), op.args.end(), [](const auto& arg) { return arg.isDevice(); });
    watch.emplace(device == op.args.end() ? c10::Device(c10::kCPU) : device->toDevice());
  }
  const std::unordered_map<int32_t, at::Tensor> written =
      writable(op, [&](int32_t read) { return takes_over(read) ? memory_of(read) : copy_of(memory_of(read)); });
  std::vector<at::Tensor> results = call(op, [&](const TensorRef& ref) {
    const auto found = written.find(ref.value);
    const at::Tensor tensor = ref.value < 0            ? checked(ref)
                              : found != written.end() ? view_of(found->second, ref)
                                                       : view_of(memory_of(ref.value), ref);
    if (&ref == &op.refs.back()) watch.emplace(tensor.device());  // the copies are no part of it
    return tensor;
  });
  if (watch) {
    watch->stop();
    watches_.emplace_back(index, std::move(*watch));
  }
  if (op.traits->is_garbage) {
    // What is read of it before it is written must not come out as it was because the memory is the same.
    for (const at::Tensor& result : results) bytes_of(result).fill_(kGarbage);
  }
  bool is_same = true;
  for (size_t k = 0; k < op.writes.size(); ++k) {
    const Value& value = values_[op.writes[k].value];
    if (value.is_uninitialised || value.is_torn) continue;
    // Those have bytes that nobody wrote.
    if (op.traits->has_workspace && results[k].scalar_type() == at::kByte) continue;
    is_same = is_same && has_same_bits(value, results[k]);
  }
  for (size_t k = 0; k < op.writes.size(); ++k) {
    Value& value = values_[op.writes[k].value];
    value.can_forget = value.can_forget && is_same;
    if (value.hash) try_forms(op.writes[k].value, results[k]);
    if (!is_same && value.held.defined()) results[k] = value.held;
  }
  return results;
}

void Tape::rehearse() {
  DT_INVARIANT(is_profile_ && has_ended_);
  const checkpoint::RandomStates states = checkpoint::RandomStates::now();
  const checkpoint::RandomStatesGuard random_states(&states);
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  const at::NoGradGuard no_grad;
  std::vector<int32_t> last_reader(values_.size(), -1);
  for (size_t i = 0; i < ops_.size(); ++i) {
    for (const int32_t read : ops_[i].reads) last_reader[read] = static_cast<int32_t>(i);
  }
  std::vector<at::Tensor> fresh(values_.size());
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    bool can_call = can_rehearse(op);
    for (const int32_t read : op.reads) {
      if (!fresh[read].defined() && values_[read].held.defined() && !values_[read].is_torn) {
        fresh[read] = values_[read].held;
      }
      can_call = can_call && fresh[read].defined();
    }
    if (!can_call) {
      for (const Slot& slot : op.writes) values_[slot.value].can_forget = false;
      continue;
    }
    const auto is_last = [&](int32_t read) { return last_reader[read] == static_cast<int32_t>(i); };
    const std::vector<at::Tensor> results = rehearse_op(
        static_cast<int32_t>(i), [&](int32_t read) -> const at::Tensor& { return fresh[read]; },
        [&](int32_t read) { return is_last(read) && !values_[read].held.defined(); });
    for (size_t k = 0; k < op.writes.size(); ++k) {
      if (last_reader[op.writes[k].value] >= 0) fresh[op.writes[k].value] = results[k];
    }
    for (const int32_t read : op.reads) {
      if (is_last(read)) fresh[read].reset();
    }
  }
  for (size_t value = 0; value < values_.size(); ++value) {
    if (values_[value].held.defined()) try_forms(static_cast<int32_t>(value), values_[value].held);
  }
}

// The operations that computing a value again calls, in forward's order; empty: it cannot be, or some of them have been
// called often enough (what many ask for that autograd does not save would be called again for each).
std::vector<int32_t> Tape::ops_to_rehearse(int32_t value) const {
  constexpr uint8_t kMostCalls = 2;
  std::set<int32_t> ops;
  std::vector<int32_t> todo{value};
  while (!todo.empty()) {
    const int32_t next = todo.back();
    todo.pop_back();
    const int32_t index = values_[next].op;
    if (index < 0 || !values_[next].can_forget || num_rehearsed_[index] == kMostCalls) return {};
    if (ops.count(index) != 0) continue;
    if (!can_rehearse(ops_[index])) return {};
    ops.insert(index);
    for (const int32_t read : ops_[index].reads) {
      if (values_[read].is_torn) return {};
      if (!values_[read].held.defined()) todo.push_back(read);
    }
  }
  return {ops.begin(), ops.end()};
}

void Tape::rehearse_value(int32_t value) {
  num_rehearsed_.resize(ops_.size());
  if (values_[value].op >= 0 && num_rehearsed_[values_[value].op] > 0) return;
  const std::vector<int32_t> ops = ops_to_rehearse(value);
  if (ops.empty()) return;  // before random states are copied, for every value
  const checkpoint::RandomStates states = checkpoint::RandomStates::now();
  const checkpoint::RandomStatesGuard random_states(&states);
  const at::NoGradGuard no_grad;
  std::unordered_map<int32_t, int32_t> last_reader;
  for (const int32_t index : ops) {
    for (const int32_t read : ops_[index].reads) last_reader[read] = index;
  }
  std::unordered_map<int32_t, at::Tensor> fresh;
  for (const int32_t index : ops) {
    ++num_rehearsed_[index];
    const Op& op = ops_[index];
    const std::vector<at::Tensor> results = rehearse_op(
        index,
        [&](int32_t read) -> const at::Tensor& {
          const auto found = fresh.find(read);
          return found == fresh.end() ? values_[read].held : found->second;
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

bool Tape::can_rehearse(const Op& op) const {
  return can_replay(op) && std::all_of(op.refs.begin(), op.refs.end(), [&](const TensorRef& ref) {
           if (ref.value < 0) return !is_freed(ref) && !is_written(ref);
           const Value& value = values_[ref.value];
           return !value.held.defined() || value.is_torn || value.held._version() == value.held_version;
         });
}

// As what was saved; of what was not, nothing is known.
bool Tape::has_same_bits(const Value& value, const at::Tensor& tensor) const {
  if (!value.held.defined() && !value.hash) return true;
  const bool is_same = value.held.defined() ? has_bytes_of(tensor, value.held) : *value.hash == hash_of_storage(tensor);
  // Zeros say nothing: what is added to them unseen, by other ranks for instance, may be zero just now.
  return is_same && (tensor.storage().nbytes() == 0 || !is_all_zero(tensor));
}

// What each form would take, in bytes and time.
void Tape::try_forms(int32_t index, const at::Tensor& tensor) {
  Value& value = values_[index];
  if (value.is_overwritten || value.is_torn || value.num_saved == 0) return;
  if (!value.can_forget || value.is_uninitialised) return;
  for (const int8_t form : forms_->tried) {
    Stopwatch watch(tensor.device());
    int64_t bytes = 0;
    if (form == kOnHost) {
      if (!forms_->pool || value.bytes < kSmallestOffload) continue;
      saved_tensors::Offloaded::begin(forms_->pool, bytes_of(tensor)).take();
    } else {
      const saved_tensors::Packing packing = packing_of(form);
      if (!saved_tensors::is_packable(tensor.scalar_type(), packing) || value.bytes % tensor.itemsize() != 0) continue;
      const std::optional<saved_tensors::Packed> packed = saved_tensors::pack(flat_of(tensor, tensor.dtype()), packing);
      if (!packed) continue;
      bytes = packed->nbytes();
      saved_tensors::unpack(*packed);
    }
    watch.stop();
    if (bytes < value.bytes) value.forms.push_back({form, bytes, watch.seconds()});
  }
}

std::vector<Tape::ValueTrace> Tape::value_traces() const {
  std::vector<ValueTrace> traces;
  for (const Value& value : values_) {
    // What is written over and cannot be brought back is copied before, where backward needs it.
    traces.push_back(
        {value.bytes, !value.is_overwritten || !value.can_forget, value.can_forget, value.replaces, value.forms});
  }
  return traces;
}

// The same for operations that do the same work.
uint64_t Tape::kind_of(const Op& op) {
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

// What one of a kind took more or less than another is mostly chance, by which the solver is not to choose: each has
// the kind's median.
std::vector<Tape::OpTrace> Tape::op_traces() const {
  std::vector<uint64_t> kinds;
  for (const Op& op : ops_) kinds.push_back(kind_of(op));
  std::unordered_map<uint64_t, std::vector<double>> seconds_of;
  for (const auto& [op, watch] : watches_) seconds_of[kinds[op]].push_back(watch.seconds());
  for (auto& [_, seconds] : seconds_of) std::sort(seconds.begin(), seconds.end());
  std::vector<OpTrace> traces;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    std::vector<int32_t> writes;
    for (const Slot& slot : op.writes) writes.push_back(slot.value);
    const auto found = seconds_of.find(kinds[i]);
    std::optional<double> seconds;
    if (found != seconds_of.end()) seconds = found->second[found->second.size() / 2];
    traces.push_back({op.traits->name, op.module, seconds, op.reads, writes, op.arguments});
  }
  return traces;
}

}  // namespace drivetrain::budget
