// Reads plain parameters on all threads, by code that only looks at memory; see step_reader.h.
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/plain_keys.h"
#include "formats/storage_torch.h"
#include "optim/python_values.h"
#include "optim/step_reader.h"
#include "optim/tensor_checks.h"

namespace drivetrain::optim {
namespace {

constexpr size_t kAhead = 16;  // parameters between the prefetch and the read

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

bool same_memory(const c10::TensorImpl& param, const c10::TensorImpl& other) {
  return other.device() == param.device() &&
         c10::isComplexType(other.dtype().toScalarType()) == c10::isComplexType(param.dtype().toScalarType());
}

bool same_kind(const c10::TensorImpl& param, const c10::TensorImpl& other) {
  return other.sizes().equals(param.sizes()) && same_memory(param, other);
}

}  // namespace

void Footprint::prefetch(bool with_state) const {
  optim::prefetch(meta, 3);
  const int count = with_state ? num_tensors : std::min(num_tensors, 2);
  for (int i = 0; i < (with_state ? num_objects : 0); ++i) optim::prefetch(objects[i]);
  for (int i = 0; i < count; ++i) {
    optim::prefetch(tensors[i], sizeof(c10::TensorImpl) / 64 + 1);
    optim::prefetch(storages[i]);
  }
  optim::prefetch(step_value);
}

void Footprint::add(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  tensors[num_tensors] = impl;
  storages[num_tensors] = impl->unsafe_storage().unsafeGetStorageImpl();
  ++num_tensors;
}

void Footprint::add(PyObject* object, const at::Tensor& tensor) {
  objects[num_objects++] = object;
  add(tensor);
}

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
        if (is_name(key, states[s].codes_name) && THPVariable_Check(value)) codes[s] = value;
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

StepReader::Known::Known(const Entry& entry, const c10::TensorImpl& of, bool shares)
    : param(entry.param),
      group(entry.group),
      dtype(of.dtype().toScalarType()),
      device(of.device()),
      shares_storage(shares),
      num_dims(of.dim()) {
  std::copy_n(of.sizes().begin(), num_dims, sizes);
}

bool StepReader::Known::is(const Entry& entry, const c10::TensorImpl& now) const {
  return param == entry.param && group == entry.group && num_dims == now.dim() &&
         std::equal(now.sizes().begin(), now.sizes().end(), sizes) && dtype == now.dtype().toScalarType() &&
         device == now.device();
}

// Returns the knowledge about a parameter if only the optimizer's state refers to the values, else nothing.
std::optional<StepReader::Known> StepReader::known_from_now(const Entry& entry, const StateValues& values) const {
  const c10::TensorImpl& param = *THPVariable_Unpack(entry.param).unsafeGetTensorImpl();
  if (last_look_ < 0 || param.dim() > Known::kMaxDims || entry.state == nullptr || Py_REFCNT(entry.state) != 1) {
    return std::nullopt;
  }
  bool is_sole = true, shares_storage = false;
  const auto look_at = [&](PyObject* object) {
    if (object == nullptr) return;
    const at::Tensor& tensor = THPVariable_Unpack(object);
    is_sole &= Py_REFCNT(object) == 1 && *PyObject_GET_WEAKREFS_LISTPTR(object) == nullptr && tensor.use_count() == 1 &&
               tensor.weak_use_count() == 1;
    shares_storage |= tensor.storage().use_count() != 1;
  };
  look_at(values.step);
  look_at(values.extra);
  for (PyObject* scalar : values.scalars) look_at(scalar);
  for (PyObject* state : values.states) look_at(state);
  for (PyObject* scales : values.scales) look_at(scales);
  // Only a step that reads all states remembers shared storages.
  if (!is_sole || (shares_storage && trusts_states_)) return std::nullopt;
  return std::optional<Known>(std::in_place, entry, param, shares_storage);
}

// Returns whether states that were known in the last step still are.
bool StepReader::can_trust_states() const {
  if (last_look_ < 0 || last_look_ != looks_known_ || groups_.size() != groups_known_.size()) return false;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_known_[i] != std::pair(groups_[i].rule, groups_[i].precision)) return false;
  }
  return std::all_of(shared_storages_.begin(), shared_storages_.end(), [](const SharedStorage& shared) {
    return shared == SharedStorage{shared.storage, shared.storage->data(), shared.storage->nbytes()};
  });
}

void StepReader::remember_shared_storages() {
  shared_storages_.clear();
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (readings_[i].known.param == nullptr || !readings_[i].known.shares_storage) continue;
    Py_ssize_t position = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(entries_[i].state, &position, &key, &value)) {
      if (!THPVariable_Check(value) || !THPVariable_Unpack(value).has_storage()) continue;
      const c10::StorageImpl* storage = THPVariable_Unpack(value).storage().unsafeGetStorageImpl();
      const SharedStorage shared = {storage, storage->data(), storage->nbytes()};
      const auto same = std::find(shared_storages_.rbegin(), shared_storages_.rend(), shared);
      if (same == shared_storages_.rend()) shared_storages_.push_back(shared);
    }
  }
}

void StepReader::read() {
  are_entries_as_before_ &= num_entries_ == entries_.size();
  entries_.resize(num_entries_);
  footprints_.resize(entries_.size());
  readings_.resize(entries_.size());
  trusts_states_ = can_trust_states();
  std::atomic<bool> keeps_jobs = trusts_states_ && are_entries_as_before_ && can_keep_jobs_ && left_entries_.empty() &&
                                 (kept_jobs_write_grads_ || !writes_grads_);
  std::atomic<bool> is_any_deferred = false;
  constexpr int64_t kGrain = 64;  // parameters per thread at least
  at::parallel_for(0, static_cast<int64_t>(entries_.size()), kGrain, [&](int64_t begin, int64_t end) {
    bool are_as_before = true, are_deferred = false;
    for (int64_t i = begin; i < end; ++i) {
      readings_[i].is_deferred = readings_[i].is_as_before = false;
      if (const int64_t ahead = i + 2 * kAhead; ahead < end && !trusts_states_) {
        prefetch(entries_[ahead].state);
        prefetch(footprints_[ahead].dict_keys, 3);
      }
      if (const int64_t ahead = i + kAhead; ahead < end) {
        prefetch(entries_[ahead].param);
        footprints_[ahead].prefetch(/*with_state=*/!trusts_states_);
      }
      read_plain(entries_[i], footprints_[i], readings_[i]);
      if (readings_[i].kind == Kind::kPlain && was_cast(i)) readings_[i].kind = Kind::kOther;
      are_as_before &= readings_[i].kind != Kind::kOther && readings_[i].is_as_before;
      are_deferred |= readings_[i].is_deferred;
    }
    if (!are_as_before) keeps_jobs = false;
    if (are_deferred) is_any_deferred = true;
  });
  if (keeps_jobs) {
    has_deferred = is_any_deferred;
    renew_rules();
    return;
  }
  clear_jobs();
  add_jobs();
  if (has_wrappers || !missing.empty()) return;
  check_apart();
  stepped_.resize(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (readings_[i].kind == Kind::kNoGradient) continue;
    stepped_[i] = {entries_[i].param, readings_[i].dtype};
  }
  can_keep_jobs_ = has_plain_jobs();
  kept_jobs_write_grads_ = writes_grads_;
  if (trusts_states_) return;
  groups_known_.clear();
  for (const Group& group : groups_) groups_known_.emplace_back(group.rule, group.precision);
  remember_shared_storages();
  looks_known_ = last_look_;
}

// Returns whether a parameter was cast in place (module.half(), param.data = ...) after the last step. Its state then
// belongs to other values, and its remainder to other bits.
bool StepReader::was_cast(size_t index) const {
  if (index >= stepped_.size() || stepped_[index].param != entries_[index].param) return false;
  if (readings_[index].dtype == stepped_[index].dtype) return false;
  PyObject* state = entries_[index].state;
  return state != nullptr && PyDict_Check(state) && PyDict_Size(state) > 0;
}

void StepReader::read_plain(const Entry& entry, Footprint& footprint, Reading& reading) const {
  const bool had_no_gradient = reading.kind == Kind::kNoGradient;
  reading.kind = Kind::kOther;
  const RuleInfo& rule = *groups_[entry.group].rule;
  const at::Tensor& param_tensor = THPVariable_Unpack(entry.param);
  const c10::TensorImpl& param = *param_tensor.unsafeGetTensorImpl();
  reading.dtype = param.dtype().toScalarType();
  const bool is_known = trusts_states_ && reading.known.is(entry, param);
  if (!is_known) reading.known = {};
  if (!THPVariable_CheckExact(entry.param)) return;
  const at::Tensor& grad_tensor = grad::stored_grad(param, reading.is_deferred);
  if (!grad_tensor.defined()) {
    reading.kind = Kind::kNoGradient;
    reading.is_as_before = had_no_gradient;
    return;
  }
  const c10::TensorImpl& grad = *grad_tensor.unsafeGetTensorImpl();
  reading.device = param.device();
  TypedArray param_array = {}, grad_array = {};
  if (param.numel() == 0 || !(reading.device.is_cpu() || reading.device.is_cuda()) ||
      !read_contiguous(param, param_array) || !same_kind(param, grad) || !read_contiguous(grad, grad_array)) {
    return;
  }
  reading.in_double = param_array.format == Format::kFloat64;
  if (reading.in_double != (grad_array.format == Format::kFloat64)) return;
  footprint.meta = param.autograd_meta();
  footprint.num_objects = footprint.num_tensors = 0;
  footprint.add(param_tensor);
  footprint.add(grad_tensor);
  const void* version = nullptr;
  static_assert(sizeof(c10::VariableVersion) == sizeof(version), "it is one pointer");
  std::memcpy(&version, &param.version_counter(), sizeof(version));
  if (is_known) {
    reading.is_as_before = reading.job.param.data == param_array.data && reading.job.grad.data == grad_array.data &&
                           reading.job.grad.format == grad_array.format && reading.param == &param &&
                           reading.grad == &grad && reading.version == version;
    reading.job.param.data = param_array.data;  // Its format and its extra are as before.
    reading.job.grad = grad_array;
    if (groups_[entry.group].counts_steps && reading.device.is_cpu()) {
      const double steps = steps_done(reading.counter);
      reading.is_as_before &= steps == reading.steps_done + 1;
      reading.steps_done = steps;
    }
  } else {
    reading.job = {};
    reading.job.param = param_array;
    reading.job.grad = grad_array;
    if (!read_states(entry, param, footprint, reading)) return;
    if (!meets(rule.needs, param)) return;
    if (rule.needs != RuleInfo::Needs::kNothing) read_shape(param, reading.job);
    reading.job.numel = param.numel() * (param_tensor.is_complex() ? 2 : 1);
  }
  reading.param = param_tensor.unsafeGetTensorImpl();
  reading.grad = grad_tensor.unsafeGetTensorImpl();
  reading.version = version;
  reading.kind = Kind::kPlain;
}

// Reads the states and the step counter of a plain parameter. Returns false if the checked pass must read them.
bool StepReader::read_states(const Entry& entry, const c10::TensorImpl& param, Footprint& footprint,
                             Reading& reading) const {
  const Group& group = groups_[entry.group];
  const RuleInfo& rule = *group.rule;
  const StateValues values = state_values(entry);
  if (!values.complete) return false;
  if (entry.state != nullptr && PyDict_Check(entry.state)) {
    footprint.dict_keys = reinterpret_cast<PyDictObject*>(entry.state)->ma_keys;
  }
  if (!group.precision.is_default()) {
    if (!why_not(group.precision, reading.dtype).empty()) return false;
    reading.job.param.format = param_format(group.precision, reading.dtype);
    if (const std::optional<Extra> extra = extra_of(reading.job.param.format)) {
      if (!read_extra(values.extra, param, extra->dtype, param.numel(), reading.job.param)) return false;
      if (!THPVariable_Unpack(values.extra).sizes().equals(param.sizes())) return false;
      footprint.add(values.extra, THPVariable_Unpack(values.extra));
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
    if (!same_memory(param, state) || !is_shaped_as_state(param, state, rule.states[s])) return false;
    const std::optional<at::ScalarType> wanted = state_dtype(group.precision, param, rule.states[s].kind);
    if (wanted && state.dtype().toScalarType() != *wanted) return false;
    if (wanted && is_block_dtype(*wanted)) {
      if ((stream.data = contiguous_memory(state)) == nullptr ||
          !read_extra(values.scales[s], param, at::kFloat, num_blocks(param.numel()), stream)) {
        return false;
      }
      stream.format = *block_format_of(*wanted);
      footprint.add(values.scales[s], THPVariable_Unpack(values.scales[s]));
    } else if (!read_contiguous(state, stream)) {
      return false;
    }
    footprint.add(values.states[s], state_tensor);
  }
  reading.counter = {};
  reading.steps_done = 0;
  if (group.counts_steps) {
    if (values.step == nullptr || !THPVariable_CheckExact(values.step)) return false;
    const at::Tensor& step = THPVariable_Unpack(values.step);
    if (!is_step_counter(step, reading.device)) return false;
    footprint.add(values.step, step);
    reading.counter = counter_of(step);
    if (step.is_cpu()) {
      footprint.step_value = reading.counter.value;
      reading.steps_done = steps_done(reading.counter);
    }
  }
  for (size_t s = 0; s < rule.scalars.size(); ++s) {
    if (!THPVariable_CheckExact(values.scalars[s])) return false;
    const at::Tensor& scalar = THPVariable_Unpack(values.scalars[s]);
    if (!is_step_counter(scalar, reading.device)) return false;
    reading.scalars[s] = counter_of(scalar);
  }
  if (const std::optional<Known> known = known_from_now(entry, values)) reading.known = *known;
  return true;
}

}  // namespace drivetrain::optim
