// Reads plain parameters on all threads, by code that only looks at memory; see step_reader.h.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "base/parallel.h"
#include "base/plain_keys.h"
#include "formats/storage_torch.h"
#include "optim/python_values.h"
#include "optim/step_reader.h"
#include "optim/tensor_checks.h"

namespace drivetrain::optim {
namespace {

// Returns the memory of a contiguous plain tensor, else null.
void* contiguous_memory(const c10::TensorImpl& tensor) {
  if (!has_plain_keys(tensor) || !tensor.is_contiguous()) return nullptr;
  c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || storage->data() == nullptr) return nullptr;
  return static_cast<char*>(storage->mutable_data()) + tensor.storage_offset() * tensor.itemsize();
}

// Reads a contiguous tensor of a plain format.
bool read_contiguous(const c10::TensorImpl& tensor, TypedArray& stream) {
  const std::optional<Format> format = format_of(tensor.dtype().toScalarType());
  if (!format || (stream.data = contiguous_memory(tensor)) == nullptr) return false;
  stream.format = *format;
  return true;
}

// Reads the companion `extra` of a format.
bool read_extra(PyObject* object, const c10::TensorImpl& param, at::ScalarType dtype, int64_t numel,
                TypedArray& stream) {
  if (object == nullptr || !THPVariable_CheckExact(object)) return false;
  const c10::TensorImpl& extra = *THPVariable_Unpack(object).unsafeGetTensorImpl();
  if (extra.dtype().toScalarType() != dtype || extra.numel() != numel || extra.device() != param.device()) return false;
  return (stream.extra = contiguous_memory(extra)) != nullptr;
}

// Returns whether the object holds 8-bit codes of this kind of state. Python checks other objects under their names.
bool is_of_blocks(PyObject* object, StateKind kind) {
  if (!THPVariable_Check(object)) return false;
  const auto dtypes = block_dtypes(kind);
  const at::ScalarType found = THPVariable_Unpack(object).unsafeGetTensorImpl()->dtype().toScalarType();
  return dtypes && (found == dtypes->codes || found == dtypes->float8);
}

bool same_memory(const c10::TensorImpl& param, const c10::TensorImpl& other) {
  return other.device() == param.device() &&
         c10::isComplexType(other.dtype().toScalarType()) == c10::isComplexType(param.dtype().toScalarType());
}

bool same_kind(const c10::TensorImpl& param, const c10::TensorImpl& other) {
  return other.sizes().equals(param.sizes()) && same_memory(param, other);
}

}  // namespace

// Finds a parameter's entries in its state, which is complete if no entry is missing. torch's own classes leave some
// None (SGD's first momentum_buffer) or absent (amsgrad switched on later). Iterates over the few items of the dict
// instead of looking names up. That neither hashes nor counts references nor touches the interpreter's thread state, so
// any thread may do it while one holds the GIL.
StepReader::StateValues StepReader::state_values(const Entry& entry) const {
  static PyObject* const step_name = PyUnicode_InternFromString("step");
  static PyObject* const extra_names[] = {PyUnicode_InternFromString(kExtraNames[0]),
                                          PyUnicode_InternFromString(kExtraNames[1]),
                                          PyUnicode_InternFromString(kExtraNames[2])};
  const Group& group = groups_[entry.group];
  const auto& states = group.rule->states;
  StateValues found;
  PyObject* codes[kMaxStates] = {};
  if (entry.state != nullptr && PyDict_Check(entry.state)) {
    Py_ssize_t position = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(entry.state, &position, &key, &value)) {
      if (group.counts_steps && is_name(key, step_name)) found.step = value;
      for (size_t s = 0; s < states.size(); ++s) {
        if (is_name(key, states[s].name) && value != Py_None) found.states[s] = value;
      }
      for (size_t s = 0; s < group.rule->scalars.size(); ++s) {
        if (is_name(key, group.rule->scalars[s]) && value != Py_None) found.scalars[s] = value;
      }
      if (group.precision.is_default()) continue;
      for (size_t s = 0; s < states.size(); ++s) {
        if (is_name(key, states[s].codes_name) && is_of_blocks(value, states[s].kind)) codes[s] = value;
        if (is_name(key, states[s].scales_name) && THPVariable_Check(value)) found.scales[s] = value;
      }
      for (PyObject* name : extra_names) {
        if (is_name(key, name) && THPVariable_Check(value)) found.extra = value;
      }
    }
  }
  found.complete = true;
  for (size_t s = 0; s < states.size(); ++s) {
    if (!states[s].of_all_shapes && !has_state(*THPVariable_Unpack(entry.param).unsafeGetTensorImpl(), states[s])) {
      found.states[s] = nullptr;
      continue;
    }
    if (found.states[s] == nullptr) found.states[s] = codes[s];
    found.complete &= found.states[s] != nullptr;
  }
  for (size_t s = 0; s < group.rule->scalars.size(); ++s) found.complete &= found.scalars[s] != nullptr;
  return found;
}

void StepReader::read() {
  find_entries();
  readings_.resize(entries_.size());
  constexpr int64_t kGrain = 512;  // parameters per thread at least; fewer start no threads, as in torch
  parallel_for(0, static_cast<int64_t>(entries_.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      read_plain(entries_[i], readings_[i]);
      if (readings_[i].kind == Kind::kPlain && was_cast(i)) readings_[i].kind = Kind::kOther;
    }
  });
  const auto is_other = [](const Reading& reading) { return reading.kind == Kind::kOther; };
  const auto has_lr_on_device = [](const Group& group) { return group.numbers.lr != nullptr; };  // float() of it
  if (std::any_of(readings_.begin(), readings_.end(), is_other) ||
      std::any_of(groups_.begin(), groups_.end(), has_lr_on_device) ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    own();
  }
  add_jobs();
  if (has_wrappers || !missing.empty()) return;
  check_apart();
  stepped_.resize(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (readings_[i].kind == Kind::kNoGradient) continue;
    stepped_[i] = {entry.param, entry.state, THPVariable_Unpack(entry.param).scalar_type()};
  }
}

// Returns whether a parameter was cast in place (module.half(), param.data = ...) after the last step. Its state then
// belongs to other values, and its remainder to other bits.
bool StepReader::was_cast(size_t index) const {
  if (index >= stepped_.size() || entries_[index].state == nullptr) return false;
  const Stepped& before = stepped_[index];
  if (before.param != entries_[index].param || before.state != entries_[index].state) return false;
  if (THPVariable_Unpack(entries_[index].param).dtype().toScalarType() == before.dtype) return false;
  return PyDict_Check(entries_[index].state) && PyDict_Size(entries_[index].state) > 0;
}

void StepReader::read_plain(const Entry& entry, Reading& reading) const {
  reading = {};
  const RuleInfo& rule = *groups_[entry.group].rule;
  if (!THPVariable_CheckExact(entry.param)) return;
  const at::Tensor& param_tensor = THPVariable_Unpack(entry.param);
  const c10::TensorImpl& param = *param_tensor.unsafeGetTensorImpl();
  const at::Tensor& grad_tensor = param_tensor.grad();
  if (!grad_tensor.defined()) {
    reading.kind = Kind::kNoGradient;
    return;
  }
  const c10::TensorImpl& grad = *grad_tensor.unsafeGetTensorImpl();
  // Other tensors may call Python code to tell their sizes or device.
  if (!has_plain_keys(param) || !has_plain_keys(grad)) return;
  reading.device = param.device();
  TypedArray& param_array = reading.job.param;
  TypedArray& grad_array = reading.job.grad;
  if (param.numel() == 0 || !(reading.device.is_cpu() || reading.device.is_cuda()) ||
      !read_contiguous(param, param_array) || !same_kind(param, grad) || !read_contiguous(grad, grad_array)) {
    return;
  }
  reading.in_double = param_array.format == Format::kFloat64;
  if (reading.in_double != (grad_array.format == Format::kFloat64)) return;
  if (!read_states(entry, param, reading) || !meets(rule.needs, param)) return;
  if (rule.needs != RuleInfo::Needs::kNothing) read_shape(param, reading.job);
  reading.job.numel = param.numel() * (param_tensor.is_complex() ? 2 : 1);
  reading.param = param_tensor.unsafeGetTensorImpl();
  reading.grad = grad_tensor.unsafeGetTensorImpl();
  reading.kind = Kind::kPlain;
}

// Reads the states and the step counter of a plain parameter. Returns false if the checked pass must read them.
bool StepReader::read_states(const Entry& entry, const c10::TensorImpl& param, Reading& reading) const {
  const Group& group = groups_[entry.group];
  const RuleInfo& rule = *group.rule;
  const StateValues values = state_values(entry);
  if (!values.complete) return false;
  if (!group.precision.is_default()) {
    const at::ScalarType dtype = param.dtype().toScalarType();
    if (!why_not(group.precision, dtype).empty()) return false;
    reading.job.param.format = param_format(group.precision, dtype);
    if (const std::optional<Extra> extra = extra_of(reading.job.param.format)) {
      if (!read_extra(values.extra, param, extra->dtype, param.numel(), reading.job.param)) return false;
      if (!THPVariable_Unpack(values.extra).sizes().equals(param.sizes())) return false;
    } else if (values.extra != nullptr) {
      return false;
    }
  }
  for (size_t s = 0; s < rule.states.size(); ++s) {
    if (!has_state(param, rule.states[s])) continue;
    if (!THPVariable_CheckExact(values.states[s])) return false;
    const at::Tensor& state_tensor = THPVariable_Unpack(values.states[s]);
    const c10::TensorImpl& state = *state_tensor.unsafeGetTensorImpl();
    TypedArray& stream = reading.job.state[s];
    const std::optional<at::ScalarType> wanted = state_dtype(group.precision, param, rule.states[s].kind);
    if (wanted && state.dtype().toScalarType() != stored_dtype(*wanted)) return false;
    const std::optional<Format> in_blocks = wanted ? block_format_of(*wanted) : std::nullopt;
    const bool has_its_shape = in_blocks && is_packed(*in_blocks)
                                   ? state.dim() == 1 && state.numel() == data_bytes(*in_blocks, param.numel())
                                   : is_shaped_as_state(param, state, rule.states[s]);
    if (!same_memory(param, state) || !has_its_shape) return false;
    if (in_blocks) {
      if ((stream.data = contiguous_memory(state)) == nullptr ||
          !read_extra(values.scales[s], param, at::kFloat, num_scales(*in_blocks, param.numel()), stream)) {
        return false;
      }
      stream.format = *in_blocks;
    } else if (!read_contiguous(state, stream)) {
      return false;
    }
  }
  if (group.counts_steps) {
    if (values.step == nullptr || !THPVariable_CheckExact(values.step)) return false;
    const at::Tensor& step = THPVariable_Unpack(values.step);
    if (!is_step_counter(step, reading.device)) return false;
    reading.counter = counter_of(step);
    if (step.is_cpu()) reading.steps_done = steps_done(reading.counter);
  }
  for (size_t s = 0; s < rule.scalars.size(); ++s) {
    if (!THPVariable_CheckExact(values.scalars[s])) return false;
    const at::Tensor& scalar = THPVariable_Unpack(values.scalars[s]);
    if (!is_step_counter(scalar, reading.device)) return false;
    reading.scalars[s] = counter_of(scalar);
  }
  return true;
}

}  // namespace drivetrain::optim
