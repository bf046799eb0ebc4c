// Connects recording and profiling of one forward pass, and replays its operations; see recorded_pass.h.
#include "budget/recorder/recorded_pass.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "budget/recorder/device_timer.h"
#include "budget/recorder/read_checks.h"
#include "recompute/region.h"
#include "trace/span.h"

namespace drivetrain::budget {
namespace {

// Locks a mutex. Releases the GIL while it waits, because the owner of the mutex may need it.
class MutexLock {
 public:
  explicit MutexLock(std::recursive_mutex& mutex) : lock_(mutex, std::try_to_lock) {
    if (lock_.owns_lock()) return;
    std::optional<pybind11::gil_scoped_release> no_gil;
    if (PyGILState_Check() != 0) no_gil.emplace();
    lock_.lock();
  }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

}  // namespace

SavedTensor::~SavedTensor() {
  if (pass) pass->release(*this);
}

RecordedPass::RecordedPass(std::shared_ptr<Shared> shared, std::shared_ptr<TapePlan> plan, bool compares_checksums)
    : tape_{std::move(shared), std::move(plan), {}, {}, {}},
      store_(tape_),
      profile_(tape_.shared->is_profile ? std::make_unique<Profile>(tape_, store_) : nullptr),
      recording_(tape_, store_, profile_.get(), compares_checksums) {}

// ---- Forward

std::shared_ptr<SavedTensor> RecordedPass::save(const at::Tensor& tensor) {
  auto saved = std::make_shared<SavedTensor>(shared_from_this());
  ++num_saved_;
  saved->ref.value = -1;
  if (!is_plain(tensor)) {
    saved->ref.direct = tensor.detach();
  } else if (is_closed_) {
    describe(tensor, saved->ref);
    saved->ref.direct = alias_of(tensor);
  } else {
    recording_.save(saved, tensor);
  }
  return saved;
}

void RecordedPass::preserve(const at::Tensor& tensor) {
  const MutexLock lock(mutex_);
  recording_.preserve(tensor);
}

void RecordedPass::end() {
  is_closed_ = true;
  recording_.finish();
  count_users();
  for (size_t value = 0; value < tape_.values.size(); ++value) {
    if (tape_.values[value].num_users == 0) store_.let_go(static_cast<int32_t>(value));
  }
}

void RecordedPass::count_users() {
  has_counted_users_ = true;
  for (Value& value : tape_.values) value.num_users = value.num_saved;
  for (size_t i = tape_.ops.size(); i-- > 0;) {
    RecordedOp& op = tape_.ops[i];
    op.is_pending = is_needed(op);
    if (op.is_pending) {
      for (const int32_t read : op.reads) ++tape_.values[read].num_users;
    } else {
      op.forget_arguments();
    }
  }
}

// Returns whether a value that it wrote has users, but is not stored.
bool RecordedPass::is_needed(const RecordedOp& op) const {
  return std::any_of(op.writes.begin(), op.writes.end(), [&](const OpResult& result) {
    return tape_.values[result.value].num_users > 0 && !store_.has(result.value);
  });
}

void RecordedPass::abandon() {
  const MutexLock lock(mutex_);
  is_abandoned_ = true;
  store_.let_go_all();
}

// ---- Backward

at::Tensor RecordedPass::take(const SavedTensor& saved) {
  const MutexLock lock(mutex_);
  if (saved.ref.value < 0) return existing(saved.ref);
  if (is_abandoned_) {
    recompute::throw_checkpoint_error("this graph belongs to a step that did not fit into memory: run forward again.");
  }
  if (is_interrupted_) {
    recompute::throw_checkpoint_error(
        "an earlier backward through this graph failed while it recomputed: run forward again.");
  }
  if (profile_) profile_->note_use(saved.ref.value, /*is_release=*/false);
  try {
    const at::Tensor taken = view_for_backward(saved.ref);
    if (profile_) profile_->measure_formats(saved.ref.value);
    return taken;
  } catch (...) {
    if (profile_) profile_->note_changed_inputs();
    throw;
  }
}

void RecordedPass::release(const SavedTensor& saved) {
  const MutexLock lock(mutex_);
  --num_saved_;
  const int32_t value = saved.ref.value;
  if (value < 0) return;
  if (profile_) profile_->note_use(value, /*is_release=*/true);
  --tape_.values[value].num_saved;
  if (has_counted_users_) drop_user(value);
}

// Notes that one user of a value is gone.
void RecordedPass::drop_user(int32_t value) {
  const trace::RecomputationTally tally;
  std::vector<int32_t> todo{value};
  while (!todo.empty()) {
    const int32_t next = todo.back();
    todo.pop_back();
    if (tape_.values[next].num_users == 0) continue;  // destructors come here, so this does not throw
    if (--tape_.values[next].num_users > 0) continue;
    store_.let_go(next);
    if (tape_.values[next].op < 0) continue;
    RecordedOp& op = tape_.ops[tape_.values[next].op];
    if (!op.is_pending || is_needed(op)) continue;
    op.is_pending = false;
    todo.insert(todo.end(), op.reads.begin(), op.reads.end());
    op.forget_arguments();
  }
}

// Returns a view of a value, replayed if needed, and starts the prefetches that follow it.
at::Tensor RecordedPass::view_for_backward(const TensorRef& ref) {
  materialize(ref.value);
  store_.prefetch_at(ref.value);
  check_unwritten(tape_, ref);
  return view_of(tape_.values[ref.value].held, ref);
}

void RecordedPass::materialize(int32_t value) {
  std::optional<recompute::SwitchesGuard> switches;
  std::vector<int32_t> todo{value};
  while (!todo.empty()) {
    const Value& next = tape_.values[todo.back()];
    store_.restore(todo.back());
    if (next.held.defined()) {
      todo.pop_back();
      continue;
    }
    DT_INVARIANT(next.op >= 0 && next.can_recompute);
    const size_t before = todo.size();
    const std::vector<int32_t>& reads = tape_.ops[next.op].reads;
    // The first read is replayed first, as the solver assumes.
    for (auto read = reads.rbegin(); read != reads.rend(); ++read) {
      if (!tape_.values[*read].held.defined()) todo.push_back(*read);
    }
    if (todo.size() > before) continue;
    if (!switches) switches.emplace(switches_);
    replay(next.op);
  }
}

// Returns the memory to call an operation with for each value that it writes over.
std::unordered_map<int32_t, at::Tensor> RecordedPass::writable(const RecordedOp& op) {
  std::unordered_map<int32_t, at::Tensor> memory;
  for (const TensorRef& ref : op.refs) {
    if (ref.value < 0 || !op.traits->writes[ref.arg] || memory.count(ref.value) != 0) continue;
    const at::Tensor held = tape_.values[ref.value].held;
    // The operation writes over the value itself if it is the last user, otherwise over a copy.
    const bool takes_over = has_counted_users_ && tape_.values[ref.value].num_users <= 1;
    memory.emplace(ref.value, takes_over ? held : copy_of(held));
    if (!takes_over) continue;
    store_.let_go(ref.value);
    is_interrupted_ = true;  // until the call has returned
  }
  return memory;
}

void RecordedPass::replay(int32_t index) {
  RecordedOp& op = tape_.ops[index];
  for (const TensorRef& ref : op.refs) {
    if (ref.value >= 0) check_unwritten(tape_, ref);
  }
  check_checksums(tape_, op);
  const double begin = now();
  std::unordered_map<int32_t, at::Tensor> written = writable(op);
  std::optional<DeviceTimer> timer;
  const auto tensor_of = [&](const TensorRef& ref) {
    if (ref.value < 0) return existing(ref);
    const auto found = written.find(ref.value);
    return view_of(found == written.end() ? tape_.values[ref.value].held : found->second, ref);
  };
  const std::vector<at::Tensor> results = op.call(tensor_of, profile_ ? &timer : nullptr);
  written.clear();
  is_interrupted_ = false;
  const double seconds = now() - begin;
  if (op.planned >= 0) tape_.plan->seconds[op.planned] += seconds;
  tape_.shared->tracker.count_replay(seconds);
  if (profile_) profile_->note_replay(index, std::move(*timer), results);
  for (size_t i = 0; i < op.writes.size(); ++i) {
    Value& value = tape_.values[op.writes[i].value];
    if (store_.has(op.writes[i].value)) continue;
    if (static_cast<int64_t>(results[i].storage().nbytes()) != value.bytes) {
      recompute::throw_checkpoint_error(text(op.traits->name, " returned ", results[i].storage().nbytes(),
                                             " bytes when it was recomputed, expected ", value.bytes,
                                             " bytes as in the forward pass."));
    }
    store_.hold(op.writes[i].value, results[i]);
    value.is_recomputed = true;
  }
  if (!has_counted_users_) return;
  for (const OpResult& result : op.writes) {
    if (tape_.values[result.value].num_users == 0) store_.let_go(result.value);
  }
  op.is_pending = false;
  for (const int32_t read : op.reads) drop_user(read);
  op.forget_arguments();
}

}  // namespace drivetrain::budget
