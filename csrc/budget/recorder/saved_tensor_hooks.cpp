// Implements the saved-tensor hooks of recorded passes; see saved_tensor_hooks.h.
#include "budget/recorder/saved_tensor_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>
#include <vector>

#include "recompute/hooks.h"

namespace drivetrain::budget {
namespace {

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

}  // namespace

PyObject* profile_ended() {
  static PyObject* type = PyErr_NewException("drivetrain._C.ActivationProfileEnded", PyExc_BaseException, nullptr);
  return type;
}

PyObject* push_pass_hooks(const std::shared_ptr<RecordedPass>& pass) {
  recompute::push_hooks(&pack_method, recompute::capsule(pass, kPass), &unpack_method);
  return at::SavedTensorDefaultHooks::get_tls_state().stack.top().first.ptr(getPyInterpreter());
}

void remove_pass_hooks(PyObject* pack) {
  const PyObject* top = at::SavedTensorDefaultHooks::get_tls_state().stack.empty()
                            ? nullptr
                            : at::SavedTensorDefaultHooks::get_tls_state().stack.top().first.ptr(getPyInterpreter());
  if (top == pack) {
    at::SavedTensorDefaultHooks::pop_hooks();
    return;
  }
  at::impl::SavedTensorDefaultHooksTLS state = at::SavedTensorDefaultHooks::get_tls_state();
  std::vector<std::pair<c10::SafePyObject, c10::SafePyObject>> others;
  for (; !state.stack.empty(); state.stack.pop()) {
    if (state.stack.top().first.ptr(getPyInterpreter()) != pack) others.push_back(state.stack.top());
  }
  for (; !others.empty(); others.pop_back()) state.stack.push(others.back());
  at::SavedTensorDefaultHooks::set_tls_state(state);
}

}  // namespace drivetrain::budget
