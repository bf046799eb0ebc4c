// What a tape of a profile finds out: what each operation takes when it is called again, and whether the same bits come
// out.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <utility>

#include "activation/stopwatch.h"
#include "activation/tape.h"
#include "base/check.h"

namespace drivetrain::activation {
namespace {

constexpr uint8_t kGarbage = 0xFF;             // not a number, as floating-point
constexpr int64_t kSmallestOffload = 1 << 16;  // below, a copy is mostly its start

}  // namespace

void Tape::rehearse() {
  DT_INVARIANT(is_profile_ && has_ended_);
  const RandomStates states = RandomStates::now();
  const RandomStatesGuard random_states(&states);
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  const at::NoGradGuard no_grad;
  std::vector<int32_t> last_reader(values_.size(), -1);
  for (size_t i = 0; i < ops_.size(); ++i) {
    for (const int32_t read : ops_[i].reads) last_reader[read] = static_cast<int32_t>(i);
  }
  std::vector<at::Tensor> fresh(values_.size());
  std::vector<std::pair<size_t, Stopwatch>> watches;
  for (size_t i = 0; i < ops_.size(); ++i) {
    Op& op = ops_[i];
    bool can_call = can_replay(op) && std::all_of(op.refs.begin(), op.refs.end(), [](const TensorRef& ref) {
                      return !is_freed(ref) && !is_written(ref);
                    });
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
    std::optional<Stopwatch> watch;
    const std::unordered_map<int32_t, at::Tensor> written = writable(op, [&](int32_t read) {
      const bool is_mine = last_reader[read] == static_cast<int32_t>(i) && !values_[read].held.defined();
      return is_mine ? fresh[read] : copy_of(fresh[read]);
    });
    const std::vector<at::Tensor> results = call(op, [&](const TensorRef& ref) {
      const auto found = written.find(ref.value);
      const at::Tensor tensor = ref.value < 0            ? checked(ref)
                                : found != written.end() ? view_of(found->second, ref)
                                                         : view_of(fresh[ref.value], ref);
      if (&ref == &op.refs.back()) watch.emplace(tensor.device());  // the copies are no part of it
      return tensor;
    });
    if (watch) {
      watch->stop();
      watches.emplace_back(i, std::move(*watch));
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
      const int32_t written = op.writes[k].value;
      Value& value = values_[written];
      value.can_forget = value.can_forget && is_same;
      if (value.hash) try_forms(written, results[k]);
      if (last_reader[written] < 0) continue;
      fresh[written] = is_same || !value.held.defined() ? results[k] : value.held;
    }
    for (const int32_t read : op.reads) {
      if (last_reader[read] == static_cast<int32_t>(i)) fresh[read].reset();
    }
  }
  for (const auto& [op, watch] : watches) ops_[op].seconds = watch.seconds();
  for (size_t value = 0; value < values_.size(); ++value) {
    if (values_[value].held.defined()) try_forms(static_cast<int32_t>(value), values_[value].held);
  }
}

// As what was saved; of what was not, nothing is known.
bool Tape::has_same_bits(const Value& value, const at::Tensor& tensor) const {
  if (!value.held.defined() && !value.hash) return true;
  const at::Tensor bytes = bytes_of(tensor);
  const bool is_same =
      value.held.defined() ? at::equal(bytes_of(value.held), bytes) : *value.hash == hash_of_storage(tensor);
  // Zeros say nothing: what is added to them unseen, by other ranks for instance, may be zero just now.
  return is_same && (bytes.numel() == 0 || bytes.any().item<bool>());
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
      Offloaded::begin(forms_->pool, bytes_of(tensor)).take();
    } else {
      const Packing packing = packing_of(form);
      if (!is_packable(tensor.scalar_type(), packing) || value.bytes % tensor.itemsize() != 0) continue;
      const std::optional<Packed> packed = pack(flat_of(tensor, tensor.dtype()), packing);
      if (!packed) continue;
      bytes = packed->nbytes();
      unpack(*packed);
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

std::vector<Tape::OpTrace> Tape::op_traces() const {
  std::vector<OpTrace> traces;
  for (const Op& op : ops_) {
    std::vector<int32_t> writes;
    for (const Slot& slot : op.writes) writes.push_back(slot.value);
    traces.push_back({op.traits->name, op.module, op.seconds, op.reads, writes, op.arguments});
  }
  return traces;
}

}  // namespace drivetrain::activation
