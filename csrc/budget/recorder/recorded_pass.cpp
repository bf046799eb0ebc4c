// Connects recording, profiling and replay of one forward pass; see recorded_pass.h.
#include "budget/recorder/recorded_pass.h"

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

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

RecordedPass*& RecordedPass::current() {
  static thread_local RecordedPass* pass = nullptr;
  return pass;
}

RecordedPass::RecordedPass(std::shared_ptr<MemoryTracker> tracker, std::shared_ptr<TapePlan> plan,
                           std::shared_ptr<const StorageFormats> formats, std::shared_ptr<KindsOfOps> unrepeatable,
                           bool compares_checksums, WeakModule model)
    : tracker_(std::move(tracker)),
      tape_{std::move(plan), {}, {}, {}},
      store_(tape_, tracker_, std::move(formats)),
      checks_(tape_, std::move(model)),
      replay_(tape_, store_, checks_, tracker_),
      profile_(unrepeatable
                   ? std::make_unique<Profile>(tape_, store_, replay_, checks_, tracker_, std::move(unrepeatable))
                   : nullptr),
      recording_(tape_, store_, profile_.get(), compares_checksums ? &checks_ : nullptr, tracker_) {}

RecordedPass::~RecordedPass() { store_.let_go_all(); }

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
  replay_.count_users();
  replay_.let_go_unused();
}

void RecordedPass::abandon() {
  const MutexLock lock(mutex_);
  replay_.abandon();
  store_.let_go_all();
}

at::Tensor RecordedPass::take(const SavedTensor& saved) {
  const MutexLock lock(mutex_);
  if (saved.ref.value < 0) return checks_.existing(saved.ref);
  replay_.check_usable();
  if (profile_) profile_->note_take(saved.ref.value);
  try {
    const at::Tensor taken = replay_.take(saved.ref);
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
  if (profile_) profile_->note_release(value);
  replay_.release(value);
}

}  // namespace drivetrain::budget
