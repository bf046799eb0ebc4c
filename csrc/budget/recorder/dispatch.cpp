// Hands operations and saved tensors to the recorded pass: implements the dispatcher's fallback and the hooks; see
// dispatch.h.
#include "budget/recorder/dispatch.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "budget/recorder/op_traits.h"
#include "recompute/hooks.h"

namespace drivetrain::budget {
namespace {

constexpr c10::DispatchKeySet kTransformKeys({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                              c10::DispatchKey::FuncTorchDynamicLayerBackMode});

// The pass that this thread records.
struct ThreadState {
  std::shared_ptr<RecordedPass> pass;
  PyObject* pack = nullptr;  // its pack hook, which the thread's stack of hooks owns

  ~ThreadState() {
    if (pass) pass->close();  // the thread exits during the pass
  }
};

ThreadState& thread_state() {
  static thread_local ThreadState state;
  return state;
}

// ---- The dispatcher's fallback

// Returns whether the operation must be dispatched on without being recorded. Either the operations that it consists of
// will be recorded, or a transform of torch.func still changes its arguments, or a compiler traces it.
bool is_passed_on(const c10::OperatorHandle& op, const OpTraits& traits, c10::DispatchKeySet keys) {
  if (keys.has_any(kTransformKeys)) return true;
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PythonDispatcher)) return true;
  const c10::DispatchKeySet autocast = keys & c10::autocast_dispatch_keyset;
  if (!autocast.empty() && op.hasKernelForDispatchKey(autocast.highestPriorityTypeId())) return true;
  if (!traits.is_composite) return false;
  const c10::BackendComponent backend = keys.highestBackendKey();
  return backend == c10::BackendComponent::InvalidBit || !has_kernel(op, backend);
}

void on_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  RecordedPass* pass = recorded_pass();
  if (pass == nullptr || pass->is_closed()) {
    // The recording was ended from another thread, or other code has restored this thread's dispatch keys to their
    // state within a pass.
    const std::shared_ptr<RecordedPass> ended = end_recording();
    if (ended) ended->end();
  } else {
    const OpTraits& traits = traits_of(op);
    if (!is_passed_on(op, traits, keys)) {
      pass->recording().record(op, traits, keys, stack);
      return;
    }
  }
  op.redispatchBoxed(keys & kBelowRecorder, stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_call>());
}

// ---- Saved-tensor hooks

constexpr const char* kPass = "drivetrain.RecordedPass";
constexpr const char* kSaved = "drivetrain.SavedTensor";

PyObject* pack(PyObject* pass, PyObject* tensor) {
  HANDLE_TH_ERRORS
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  auto saved = recompute::value_in<std::shared_ptr<RecordedPass>>(pass, kPass)->save(THPVariable_Unpack(tensor));
  return recompute::capsule(std::move(saved), kSaved).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* capsule) {
  HANDLE_TH_ERRORS
  const auto saved = recompute::value_in<std::shared_ptr<SavedTensor>>(capsule, kSaved);
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  const Profile* profile = saved->pass->profile();
  at::Tensor taken;
  try {
    taken = saved->pass->take(*saved);
  } catch (...) {
    if (profile == nullptr || !profile->has_failed()) throw;
  }
  if (profile != nullptr && profile->has_failed()) {
    PyErr_SetString(profile_ended(), "activation_budget: an operation returns other values when it is called again");
    return nullptr;
  }
  return THPVariable_Wrap(taken);
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_method{"pack", &pack, METH_O, nullptr};
PyMethodDef unpack_method{"unpack", &unpack, METH_O, nullptr};

// Removes the hooks of a pass from this thread's stack, and leaves hooks that were pushed above them.
void remove_pass_hooks(PyObject* pack) {
  at::impl::SavedTensorDefaultHooksTLS state = at::SavedTensorDefaultHooks::get_tls_state();
  std::vector<std::pair<c10::SafePyObject, c10::SafePyObject>> others;
  for (; !state.stack.empty(); state.stack.pop()) {
    if (state.stack.top().first.ptr(getPyInterpreter()) != pack) others.push_back(state.stack.top());
  }
  for (; !others.empty(); others.pop_back()) state.stack.push(others.back());
  at::SavedTensorDefaultHooks::set_tls_state(state);
}

}  // namespace

PyObject* profile_ended() {
  static PyObject* type = PyErr_NewException("drivetrain._C.ActivationProfileEnded", PyExc_BaseException, nullptr);
  return type;
}

RecordedPass* recorded_pass() { return thread_state().pass.get(); }

void begin_recording(const std::shared_ptr<RecordedPass>& pass) {
  recompute::push_hooks(&pack_method, recompute::capsule(pass, kPass), &unpack_method);
  thread_state().pass = pass;
  thread_state().pack = at::SavedTensorDefaultHooks::get_tls_state().stack.top().first.ptr(getPyInterpreter());
  c10::impl::tls_set_dispatch_key_included(kRecorderKey, true);
}

std::shared_ptr<RecordedPass> end_recording() {
  c10::impl::tls_set_dispatch_key_included(kRecorderKey, false);
  ThreadState& state = thread_state();
  if (!state.pass) return nullptr;
  remove_pass_hooks(std::exchange(state.pack, nullptr));
  state.pass->close();
  return std::exchange(state.pass, nullptr);
}

}  // namespace drivetrain::budget
