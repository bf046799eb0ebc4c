// The passes of reading a step; see step_reader.h.
#include "optim/step_reader.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>
#include <optional>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "base/torch_text.h"
#include "formats/storage_torch.h"
#include "formats/summation.h"
#include "optim/hypers.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

constexpr size_t kAhead = 16;  // parameters between asking for memory and reading it
constexpr int kLine = 64;

void prefetch(const void* address, int lines = 1) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(static_cast<const char*>(address) + i * kLine);
}

template <class Args>
RuleInfo rule_info(const char* name, RuleKind kind, RuleInfo::Needs needs,
                   const std::vector<std::pair<const char*, StateKind>>& states) {
  RuleInfo info{name,
                kind,
                Args::kCountsSteps,
                [](const Hypers& hypers, double step) { return RuleArgs::of(Args::make(hypers, step)); },
                nullptr,
                needs,
                {}};
  if constexpr (requires(Args args) { args.adapt(LayerSums(), int64_t()); }) {
    info.adapt = [](RuleArgs& bytes, const LayerSums& sums, int64_t numel) {
      Args args = bytes.as<Args>();
      args.adapt(sums, numel);
      bytes = RuleArgs::of(args);
    };
  }
  for (const auto& [state, kind_of_state] : states) {
    const std::string name_of_state = state;
    const auto interned = [&](const char* suffix) {
      return PyUnicode_InternFromString((name_of_state + suffix).c_str());
    };
    info.states.push_back({interned(""), interned("_codes"), interned("_scales"), kind_of_state,
                           kind_of_state == StateKind::kMean || kind_of_state == StateKind::kSquared});
  }
  return info;
}

template <template <class> class Rule>
RuleInfo rule_info(const char* name, RuleKind kind, std::initializer_list<const char*> names) {
  constexpr bool kNeedsMatrices = requires { Rule<float>::kNeedsMatrices; };
  constexpr bool kFactorsMatrices = requires { Rule<float>::kFactorsMatrices; };
  // Of matrices, two states in the place of one.
  constexpr StateKind kFactored[] = {StateKind::kSquaredOfVector, StateKind::kRowMeans, StateKind::kColumnMeans};
  DT_INVARIANT(names.size() == (kFactorsMatrices ? std::size(kFactored) : Rule<float>::kNumStates));
  std::vector<std::pair<const char*, StateKind>> states;
  for (const char* state : names) {
    const size_t s = states.size();
    const StateKind plain = Rule<float>::kSquared[s] ? StateKind::kSquared : StateKind::kMean;
    states.emplace_back(state, kFactorsMatrices ? kFactored[s] : plain);
  }
  return rule_info<typename Rule<float>::Args>(name, kind,
                                               kNeedsMatrices     ? RuleInfo::Needs::kMatrix
                                               : kFactorsMatrices ? RuleInfo::Needs::kRealRowByRow
                                                                  : RuleInfo::Needs::kNothing,
                                               states);
}

// Whether the parameter has that state.
bool has_state(const c10::TensorImpl& param, const RuleInfo::State& state) {
  return state.of_all_shapes || (param.dim() < 2) == (state.kind == StateKind::kSquaredOfVector);
}

// Whether a dict's key is that interned name. A key that is equal but not interned (an unpickled one may be) differs in
// address only.
bool is_name(PyObject* key, PyObject* name) {
  return key == name || (PyUnicode_CheckExact(key) && PyUnicode_GET_LENGTH(key) == PyUnicode_GET_LENGTH(name) &&
                         PyUnicode_KIND(key) == PyUnicode_KIND(name) &&
                         std::memcmp(PyUnicode_DATA(key), PyUnicode_DATA(name),
                                     PyUnicode_GET_LENGTH(name) * PyUnicode_KIND(name)) == 0);
}

// A tensor on a CUDA device, or null.
const at::Tensor* cuda_tensor(PyObject* value) {
  if (!THPVariable_Check(value)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(value);
  return tensor.is_cuda() ? &tensor : nullptr;
}

double number_of(PyObject* value) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
}

// A group's hyper-parameters, from the dict that the Python class made of them. A learning rate on a device stays
// there; to read another number there is to wait for the device.
// index: of the group.
GroupNumbers numbers_of(py::handle hypers, size_t index) {
  struct Field {
    PyObject* name;  // interned, never freed
    double Hypers::* value;
  };
  static const std::vector<Field> fields = {
#define DT_ROW(name) {PyUnicode_InternFromString(#name), &Hypers::name},
      DT_HYPERS(DT_ROW)
#undef DT_ROW
  };
  GroupNumbers numbers = {};
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(hypers.ptr(), &position, &key, &value)) {
    const auto field = std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return is_name(key, f.name); });
    if (field == fields.end()) {
      throw InvariantError(text("no rule has the hyper-parameter '", py::str(key).cast<std::string>(),
                                "' that the optimizer class gave"));
    }
    if (const at::Tensor* tensor = cuda_tensor(value); tensor != nullptr && field->value == &Hypers::lr) {
      if (tensor->numel() != 1 || (tensor->scalar_type() != at::kFloat && tensor->scalar_type() != at::kDouble)) {
        throw UserTypeError(text("param_groups[", index, "]: lr is a tensor of ", tensor->scalar_type(), " of shape ",
                                 tensor->sizes(), ", expected one float32 or float64."));
      }
      numbers.lr = tensor->data_ptr();
      numbers.lr_is_double = tensor->scalar_type() == at::kDouble;
    } else {
      numbers.hypers.*(field->value) = number_of(value);
    }
  }
  return numbers;
}

bool is_double(const at::Tensor& tensor) { return c10::toRealValueType(tensor.scalar_type()) == at::kDouble; }

// Not a wrapper around other tensors (DTensor, FakeTensor): its data is where its storage says.
bool has_own_memory(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.key_set().has(c10::DispatchKey::Python) &&
         !tensor.key_set().has(c10::DispatchKey::Functionalize);
}

// The keys of a tensor that is what its memory is: no wrapper, not sparse, no lazy conjugation or negation.
constexpr c10::DispatchKeySet kPlainKeys =
    c10::DispatchKeySet(c10::DispatchKey::Dense) | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
    c10::autocast_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);

// Where the tensor can be walked from its first element to its last; null if it cannot.
void* contiguous_memory(const c10::TensorImpl& tensor) {
  if ((tensor.key_set().raw_repr() & ~kPlainKeys.raw_repr()) != 0 || !tensor.is_contiguous()) return nullptr;
  c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || storage->data() == nullptr) return nullptr;
  return static_cast<char*>(storage->mutable_data()) + tensor.storage_offset() * tensor.itemsize();
}

// The same in one of the plain formats.
bool read_contiguous(const c10::TensorImpl& tensor, TypedArray& stream) {
  const std::optional<Format> format = format_of(tensor.dtype().toScalarType());
  if (!format || (stream.data = contiguous_memory(tensor)) == nullptr) return false;
  stream.format = *format;
  return true;
}

// What a format has beside its values.
bool read_extra(PyObject* object, const c10::TensorImpl& param, at::ScalarType dtype, int64_t numel,
                TypedArray& stream) {
  if (object == nullptr || !THPVariable_CheckExact(object)) return false;
  const c10::TensorImpl& extra = *THPVariable_Unpack(object).unsafeGetTensorImpl();
  if (extra.dtype().toScalarType() != dtype || extra.numel() != numel || extra.device() != param.device()) return false;
  return (stream.extra = contiguous_memory(extra)) != nullptr;
}

// The shape of a parameter for a rule that asks for it, as the memory has it that is walked; vectors have none.
void read_shape(const c10::TensorImpl& param, ParamJob& job) {
  if (param.dim() < 2) return;
  job.rows = param.size(-2);
  job.columns = param.size(-1);
  job.is_transposed = !param.is_contiguous();
}

bool meets(RuleInfo::Needs needs, const c10::TensorImpl& param) {
  if (needs == RuleInfo::Needs::kNothing) return true;
  return !c10::isComplexType(param.dtype().toScalarType()) && (needs != RuleInfo::Needs::kMatrix || param.dim() == 2);
}

bool same_memory(const c10::TensorImpl& param, const c10::TensorImpl& other) {
  return other.device() == param.device() &&
         c10::isComplexType(other.dtype().toScalarType()) == c10::isComplexType(param.dtype().toScalarType());
}

bool has_place_of(const at::Tensor& tensor, const at::Tensor& param) {
  return tensor.sizes().equals(param.sizes()) && tensor.device() == param.device();
}

bool same_kind(const c10::TensorImpl& param, const c10::TensorImpl& other) {
  return other.sizes().equals(param.sizes()) && same_memory(param, other);
}

bool is_shaped_as_state(const c10::TensorImpl& param, const c10::TensorImpl& state, const RuleInfo::State& info) {
  return info.of_all_shapes ? state.sizes().equals(param.sizes())
                            : state.sizes().equals(*state_sizes(param, info.kind));
}

at::Device counter_device(const at::Device& of_param) { return of_param.is_cuda() ? of_param : at::Device(at::kCPU); }

bool is_step_counter(const at::Tensor& step, const at::Device& of_param) {
  return step.device() == counter_device(of_param) && step.numel() == 1 &&
         (step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble);
}

StepCounter counter_of(const at::Tensor& step) { return {step.data_ptr(), step.scalar_type() == at::kDouble}; }

double steps_done(const StepCounter& counter) {
  return counter.is_double ? *static_cast<double*>(counter.value) : *static_cast<float*>(counter.value);
}

const at::Tensor& contiguous_copy(Batch& batch, const at::Tensor& tensor) {
  batch.copies.push_back({tensor, tensor.detach().clone(at::MemoryFormat::Contiguous)});
  return batch.copies.back().copy;
}

// `value` itself if it lies in memory as `like` does, else a copy that does (written back after the step if asked).
const at::Tensor& laid_out_as(Batch& batch, const at::Tensor& like, const at::Tensor& value, bool write_back) {
  const bool same = (like.is_contiguous() && value.is_contiguous()) || like.strides().equals(value.strides());
  if (same && !value.is_conj() && !value.is_neg()) return value;
  at::Tensor copy = at::empty_strided(like.sizes(), like.strides(), value.options());
  copy.copy_(value.detach());
  batch.copies.push_back({write_back ? value : at::Tensor(), copy});
  return batch.copies.back().copy;
}

}  // namespace

const RuleInfo& find_rule(const std::string& name) {
  static const std::vector<RuleInfo> rules = {
#define DT_ROW(Rule, name, ...) rule_info<Rule>(name, RuleKind::k##Rule, {__VA_ARGS__}),
      DT_OPTIM_RULES(DT_ROW) DT_LAYER_RULES(DT_ROW)
#undef DT_ROW
  };
  for (const RuleInfo& rule : rules) {
    if (name == rule.name) return rule;
  }
  throw UserError(text("drivetrain has no optimizer rule named '", name, "'"));
}

bool is_state_as(const at::Tensor& param, const at::Tensor& state, const at::Tensor* scales,
                 std::optional<at::ScalarType> dtype) {
  if (!dtype) return format_of(state.scalar_type()).has_value();
  if (state.scalar_type() != *dtype) return false;
  if (!is_block_dtype(*dtype)) return true;
  // Blocks are cut out of the memory in its own order.
  const bool in_order = is_walkable(param) ? state.strides().equals(param.strides()) : state.is_contiguous();
  return (in_order || state.numel() < 2 || (param.is_contiguous() && state.is_contiguous())) && scales != nullptr &&
         scales->scalar_type() == at::kFloat && scales->device() == param.device() && scales->is_contiguous() &&
         scales->numel() == num_blocks(param.numel());
}

void Footprint::prefetch() const {
  for (int i = 0; i < num_objects; ++i) optim::prefetch(objects[i]);
  for (int i = 0; i < num_tensors; ++i) {
    optim::prefetch(tensors[i], sizeof(c10::TensorImpl) / kLine + 1);
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

void StepReader::begin(const py::dict& state, const py::list& fresh, bool treats_grads) {
  state_ = state;
  treats_grads_ = treats_grads;
  state_position_ = 0;
  fresh_.clear();
  for (const py::handle& param : fresh) fresh_.insert(param.ptr());
  groups_.clear();
  entries_.clear();
  missing = py::list();
  has_wrappers = false;
  for (Batch& batch : batches) {
    batch.params.clear();
    batch.written_of.clear();
    batch.copies.clear();
    batch.total = batch.num_chunks = 0;
    batch.starts.clear();
    batch.empty_starts.clear();
    batch.numbers.clear();
    batch.numbers_group = -1;
  }
  rules.clear();
  written.clear();
  entry_of_.clear();
  rule_group_ = -1;
}

std::vector<c10::intrusive_ptr<c10::TensorImpl>> StepReader::owners() const {
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> owners;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (readings_[i].kind == Kind::kNoGradient) continue;
    const at::Tensor& param = THPVariable_Unpack(entries_[i].param);
    owners.push_back(param.getIntrusivePtr());
    if (param.grad().defined()) owners.push_back(param.grad().getIntrusivePtr());
    const StateValues values = state_values(entries_[i]);
    if (values.step != nullptr) owners.push_back(THPVariable_Unpack(values.step).getIntrusivePtr());
    for (PyObject* const* tensors : {values.states, values.scales}) {
      for (int s = 0; s < kMaxStates; ++s) {
        if (tensors[s] != nullptr) owners.push_back(THPVariable_Unpack(tensors[s]).getIntrusivePtr());
      }
    }
    if (values.extra != nullptr) owners.push_back(THPVariable_Unpack(values.extra).getIntrusivePtr());
  }
  return owners;
}

void StepReader::add_group(py::handle group, size_t index, const RuleInfo& rule, py::handle hypers,
                           const Precision& precision) {
  check_hypers(hypers, index);
  groups_.push_back({group, index, &rule, hypers, precision,
                     rule.counts_steps || precision.rounding == Rounding::kStochastic, numbers_of(hypers, index)});
  PyObject* params = PyDict_GetItemString(group.ptr(), "params");
  DT_INVARIANT(params != nullptr && PyList_Check(params));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    entries_.push_back({param, find_state(param), static_cast<uint32_t>(groups_.size() - 1), static_cast<uint32_t>(i)});
  }
}

// state[param], without Python-level hashing in the usual case that the dict is in the parameters' order.
PyObject* StepReader::find_state(PyObject* param) {
  constexpr int kLookAhead = 4;  // parameters without a gradient may have no entry, or one to skip
  Py_ssize_t position = state_position_;
  PyObject *key = nullptr, *value = nullptr;
  for (int i = 0; i < kLookAhead && PyDict_Next(state_.ptr(), &position, &key, &value); ++i) {
    if (key == param) {
      state_position_ = position;
      return value;
    }
  }
  value = PyDict_GetItemWithError(state_.ptr(), param);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// State counts as there if every entry is: torch's own classes leave some that are None (SGD's first momentum_buffer)
// or absent (amsgrad switched on later). Walks the few items of the dict instead of looking names up: that neither
// hashes nor counts references nor touches the interpreter's thread state, so any thread may do it while one has the
// GIL.
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
  return found;
}

// ---- Plain tensors, on all threads.

void StepReader::read() {
  footprints_.resize(entries_.size());
  readings_.resize(entries_.size());
  constexpr int64_t kGrain = 64;  // parameters that are worth a thread
  at::parallel_for(0, static_cast<int64_t>(entries_.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (const int64_t ahead = i + 2 * kAhead; ahead < end) {
        prefetch(entries_[ahead].state);
        prefetch(footprints_[ahead].dict_keys, 3);
      }
      if (const int64_t ahead = i + kAhead; ahead < end) {
        prefetch(entries_[ahead].param);
        footprints_[ahead].prefetch();
      }
      read_plain(entries_[i], footprints_[i], readings_[i]);
      if (readings_[i].kind == Kind::kPlain && was_cast(i)) readings_[i].kind = Kind::kOther;
    }
  });
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (readings_[i].kind == Kind::kPlain) add_job(entries_[i], readings_[i]);
    if (readings_[i].kind == Kind::kOther) read_other(entries_[i]);
  }
  if (has_wrappers || !missing.empty()) return;
  check_apart();
  stepped_.resize(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (readings_[i].kind == Kind::kNoGradient) continue;
    stepped_[i] = {entries_[i].param, readings_[i].dtype};
  }
}

// Whether a parameter was cast in place (module.half(), param.data = ...) after the last step: what its state was made
// for is gone, and its remainder, if it has one, belongs to other bits.
bool StepReader::was_cast(size_t index) const {
  if (index >= stepped_.size() || stepped_[index].param != entries_[index].param) return false;
  if (readings_[index].dtype == stepped_[index].dtype) return false;
  PyObject* state = entries_[index].state;
  return state != nullptr && PyDict_Check(state) && PyDict_Size(state) > 0;
}

// Memory that two parameters share would be written by two threads at once.
void StepReader::check_apart() {
  memory_.clear();
  const auto add = [&](const c10::TensorImpl* tensor, size_t index, bool is_grad) {
    // Of other layouts nobody can tell cheaply (x[::2] and x[1::2] are apart).
    if (tensor->numel() == 0 || !tensor->is_non_overlapping_and_dense()) return;
    const char* begin = static_cast<const char*>(tensor->unsafe_storage().data()) +
                        tensor->storage_offset() * static_cast<int64_t>(tensor->itemsize());
    memory_.push_back({begin, begin + tensor->numel() * tensor->itemsize(), static_cast<uint32_t>(index), is_grad});
  };
  const auto add_plain = [&](const TypedArray& stream, int64_t numel, size_t index, bool is_grad) {
    const char* begin = static_cast<const char*>(stream.data);
    memory_.push_back({begin, begin + numel * bytes_of(stream.format), static_cast<uint32_t>(index), is_grad});
  };
  for (size_t i = 0; i < written.size(); ++i) {
    const Reading& reading = readings_[entry_of_[i]];
    if (reading.kind == Kind::kPlain) {  // not from the tensors: thousands of them are no longer in the cache
      add_plain(reading.job.param, reading.job.numel, i, false);
      if (treats_grads_) add_plain(reading.job.grad, reading.job.numel, i, true);
    } else {
      add(written[i].param, i, false);
      if (treats_grads_) add(written[i].grad, i, true);
    }
  }
  if (memory_ == known_as_apart_) return;  // as in most steps
  known_as_apart_ = memory_;
  std::sort(memory_.begin(), memory_.end(), [](const Memory& a, const Memory& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < memory_.size(); ++i) {
    if (memory_[i].begin >= memory_[i - 1].end) continue;
    known_as_apart_.clear();
    const auto [first, second] = std::minmax(memory_[i - 1].written, memory_[i].written);
    const Entry &a = entries_[entry_of_[first]], &b = entries_[entry_of_[second]];
    if (first == second) {
      throw UserError(text(label(a),
                           " and its gradient share memory, and this step writes gradients (max_grad_norm, "
                           "zero_grads_in_step or grad_scale): give it a gradient of its own with .clone()."));
    }
    if (a.param == b.param) {
      throw UserError(text(label(b), " is in its group twice (it is ", label(a), " too): leave one of the two out."));
    }
    if (!memory_[i].is_grad && !memory_[i - 1].is_grad) {
      throw UserError(text(label(a), " and ", label(b), " share memory: give the optimizer one of them."));
    }
    throw UserError(text(label(a), " and ", label(b),
                         " share the memory of a gradient, and this step writes gradients (max_grad_norm, "
                         "zero_grads_in_step or grad_scale): give each one of its own with .clone()."));
  }
}

void StepReader::read_plain(const Entry& entry, Footprint& footprint, Reading& reading) const {
  reading.kind = Kind::kOther;
  reading.job = {};
  const Group& group = groups_[entry.group];
  const RuleInfo& rule = *group.rule;
  const at::Tensor& param_tensor = THPVariable_Unpack(entry.param);
  const c10::TensorImpl& param = *param_tensor.unsafeGetTensorImpl();
  reading.dtype = param.dtype().toScalarType();
  if (!THPVariable_CheckExact(entry.param)) return;
  const at::Tensor& grad_tensor = param.grad();
  if (!grad_tensor.defined()) {
    reading.kind = Kind::kNoGradient;
    return;
  }
  const c10::TensorImpl& grad = *grad_tensor.unsafeGetTensorImpl();
  reading.device = param.device();
  if (param.numel() == 0 || !(reading.device.is_cpu() || reading.device.is_cuda()) ||
      !read_contiguous(param, reading.job.param) || !same_kind(param, grad) ||
      !read_contiguous(grad, reading.job.grad)) {
    return;
  }
  reading.in_double = reading.job.param.format == Format::kFloat64;
  if (reading.in_double != (reading.job.grad.format == Format::kFloat64)) return;
  const StateValues values = state_values(entry);
  if (!values.complete) return;
  if (entry.state != nullptr && PyDict_Check(entry.state)) {
    footprint.dict_keys = reinterpret_cast<PyDictObject*>(entry.state)->ma_keys;
  }
  footprint.num_objects = footprint.num_tensors = 0;
  footprint.add(param_tensor);
  footprint.add(grad_tensor);
  const at::ScalarType dtype = param.dtype().toScalarType();
  if (!group.precision.is_default()) {
    if (!why_not(group.precision, dtype).empty()) return;
    reading.job.param.format = param_format(group.precision, dtype);
    if (const std::optional<Extra> extra = extra_of(reading.job.param.format)) {
      if (!read_extra(values.extra, param, extra->dtype, param.numel(), reading.job.param)) return;
      if (!THPVariable_Unpack(values.extra).sizes().equals(param.sizes())) return;
      footprint.add(values.extra, THPVariable_Unpack(values.extra));
    } else if (values.extra != nullptr) {
      return;
    }
  }
  for (size_t s = 0; s < rule.states.size(); ++s) {
    if (!has_state(param, rule.states[s])) continue;
    if (!THPVariable_CheckExact(values.states[s])) return;
    const at::Tensor& state_tensor = THPVariable_Unpack(values.states[s]);
    const c10::TensorImpl& state = *state_tensor.unsafeGetTensorImpl();
    TypedArray& stream = reading.job.state[s];
    if (!same_memory(param, state) || !is_shaped_as_state(param, state, rule.states[s])) return;
    const std::optional<at::ScalarType> wanted = state_dtype(group.precision, param, rule.states[s].kind);
    if (wanted && state.dtype().toScalarType() != *wanted) return;
    if (wanted && is_block_dtype(*wanted)) {
      if ((stream.data = contiguous_memory(state)) == nullptr ||
          !read_extra(values.scales[s], param, at::kFloat, num_blocks(param.numel()), stream)) {
        return;
      }
      stream.format = rule.states[s].kind == StateKind::kSquared ? Format::kSquared8 : Format::kSigned8;
      footprint.add(values.scales[s], THPVariable_Unpack(values.scales[s]));
    } else if (!read_contiguous(state, stream)) {
      return;
    }
    footprint.add(values.states[s], state_tensor);
  }
  reading.counter = {};
  reading.steps_done = 0;
  if (group.counts_steps) {
    if (values.step == nullptr || !THPVariable_CheckExact(values.step)) return;
    const at::Tensor& step = THPVariable_Unpack(values.step);
    if (!is_step_counter(step, reading.device)) return;
    footprint.add(values.step, step);
    reading.counter = counter_of(step);
    if (step.is_cpu()) {
      footprint.step_value = reading.counter.value;
      reading.steps_done = steps_done(reading.counter);
    }
  }
  if (!meets(rule.needs, param)) return;
  if (rule.needs != RuleInfo::Needs::kNothing) read_shape(param, reading.job);
  reading.job.numel = param.numel() * (param_tensor.is_complex() ? 2 : 1);
  reading.param = param_tensor.unsafeGetTensorImpl();
  reading.grad = grad_tensor.unsafeGetTensorImpl();
  reading.kind = Kind::kPlain;
}

// ---- What is not plain, and everything's place in its launch; on one thread.

void StepReader::add_job(const Entry& entry, const Reading& reading) {
  const Group& group = groups_[entry.group];
  Batch& batch = batch_for(entry, reading.device, reading.in_double);
  ParamJob job = reading.job;
  for (size_t s = 0; s < group.rule->states.size(); ++s) {
    if (job.state[s].extra != nullptr) batch.total = num_blocks(batch.total) * kBlock;
  }
  job.begin = batch.total;
  const bool is_random = group.precision.rounding == Rounding::kStochastic;
  const uint64_t seed = is_random ? mixed(static_cast<uint64_t>(group.index) << 32 | entry.index) : 0;
  if (batch.device.is_cuda()) {
    job.rule = start_index(batch, entry, reading, seed);
  } else {
    job.rule = rule_index(entry, reading.steps_done);
    if (is_random) job.key = random_key(seed, reading.steps_done);
  }
  batch.total += job.numel;
  job.first_chunk = batch.num_chunks;
  batch.num_chunks += formats::num_chunks(job.numel);
  if (job.numel > 0) {
    batch.params.push_back(job);
    batch.written_of.push_back(static_cast<uint32_t>(written.size()));
  }
  written.push_back({reading.param, reading.grad, reading.device.is_cpu() ? reading.counter : StepCounter()});
  entry_of_.push_back(static_cast<uint32_t>(&entry - entries_.data()));
}

// Whether something is to be made or converted before the step: a state that is absent, or that lives otherwise than
// the group now asks for.
bool StepReader::lacks_state(const Entry& entry, const StateValues& values) const {
  const Group& group = groups_[entry.group];
  if (!values.complete) return true;
  // Where the rule itself counts, a missing step is an error: nobody knows which step it is.
  if (group.counts_steps && !group.rule->counts_steps && values.step == nullptr) return true;
  const at::Tensor& param = THPVariable_Unpack(entry.param);
  if (const std::optional<Extra> extra = extra_of(param_format(group.precision, param.scalar_type()))) {
    if (values.extra == nullptr) return true;
    const at::Tensor& found = THPVariable_Unpack(values.extra);
    if (found.scalar_type() != extra->dtype || !found.sizes().equals(param.sizes()) || found.device() != param.device())
      return true;
  } else if (values.extra != nullptr) {
    return true;  // what is left of another format would be taken up again later
  }
  for (size_t s = 0; s < group.rule->states.size(); ++s) {
    if (values.states[s] == nullptr || !THPVariable_Check(values.states[s])) continue;  // none, or an error of its own
    const at::Tensor& state = THPVariable_Unpack(values.states[s]);
    const RuleInfo::State& info = group.rule->states[s];
    if (!is_shaped_as_state(*param.unsafeGetTensorImpl(), *state.unsafeGetTensorImpl(), info) ||
        state.device() != param.device())
      continue;  // the same
    const auto wanted = state_dtype(group.precision, *param.unsafeGetTensorImpl(), info.kind);
    const at::Tensor* scales = values.scales[s] == nullptr ? nullptr : &THPVariable_Unpack(values.scales[s]);
    if ((wanted || is_block_dtype(state.scalar_type())) && !is_state_as(param, state, scales, wanted)) return true;
  }
  return false;
}

void StepReader::read_other(const Entry& entry) {
  const Group& group = groups_[entry.group];
  const RuleInfo& rule = *group.rule;
  const at::Tensor& param = THPVariable_Unpack(entry.param);
  const at::Tensor& grad = param.grad();
  if (!grad.defined()) return;
  if (param.key_set().has(c10::DispatchKey::Python)) {
    has_wrappers = true;
    return;
  }
  if (const size_t index = &entry - entries_.data(); was_cast(index)) {
    throw UserTypeError(text(label(entry), " is ", param.scalar_type(), " but was ", stepped_[index].dtype,
                             " in the step before: cast it back, or make a new optimizer for it (the state can be "
                             "taken along with load_state_dict)."));
  }
  check_grad(entry, param, grad);
  check_memory(entry, param, "it");
  check_memory(entry, grad, "its gradient");
  if (!meets(rule.needs, *param.unsafeGetTensorImpl())) {
    std::string optimizer = rule.name;
    optimizer[0] = static_cast<char>(std::toupper(optimizer[0]));
    throw EnvironmentError(text(label(entry), " is ", param.scalar_type(), " of shape ", param.sizes(), ": ", optimizer,
                                param.is_complex() ? " does not support complex parameters"
                                                   : " only supports 2D parameters",  // as torch says it
                                ", give it to another optimizer, AdamW say."));
  }
  if (const std::string reason = why_not(group.precision, param.scalar_type()); !reason.empty()) {
    throw UserError(text(label(entry), ": ", reason, "."));
  }
  const StateValues values = state_values(entry);
  if (lacks_state(entry, values)) {
    missing.append(py::make_tuple(py::handle(entry.param), group.index, label(entry)));
    return;
  }
  Batch& batch = batch_for(entry, param.device(), is_double(param));
  Reading reading;
  reading.in_double = is_double(param);
  reading.device = param.device();
  reading.param = param.unsafeGetTensorImpl();
  reading.grad = grad.unsafeGetTensorImpl();
  if (group.counts_steps) {
    reading.counter = counter_of(checked_step(entry, param, values.step));
    if (param.is_cpu()) reading.steps_done = steps_done(reading.counter);
  }
  const bool as_it_lies =
      rule.needs == RuleInfo::Needs::kRealRowByRow ? param.is_contiguous() && is_walkable(param) : is_walkable(param);
  const at::Tensor& walked = as_it_lies ? param : contiguous_copy(batch, param);
  reading.job.numel = real_numel(param);
  if (rule.needs != RuleInfo::Needs::kNothing) read_shape(*walked.unsafeGetTensorImpl(), reading.job);
  reading.job.param = {walked.data_ptr(), param_format(group.precision, param.scalar_type())};
  if (extra_of(reading.job.param.format)) {
    const at::Tensor& extra = THPVariable_Unpack(values.extra);
    reading.job.param.extra = laid_out_as(batch, walked, extra, /*write_back=*/true).data_ptr();
  }
  reading.job.grad = array_of(laid_out_as(batch, walked, grad, /*write_back=*/treats_grads_));
  for (size_t s = 0; s < rule.states.size(); ++s) {
    if (!has_state(*param.unsafeGetTensorImpl(), rule.states[s])) continue;
    TypedArray& stream = reading.job.state[s];
    if (THPVariable_Check(values.states[s]) && values.scales[s] != nullptr &&
        is_block_dtype(THPVariable_Unpack(values.states[s]).scalar_type()) &&
        has_place_of(THPVariable_Unpack(values.states[s]), param)) {  // lacks_state has looked at the rest
      stream.data = THPVariable_Unpack(values.states[s]).data_ptr();
      stream.extra = THPVariable_Unpack(values.scales[s]).data_ptr();
      stream.format = rule.states[s].kind == StateKind::kSquared ? Format::kSquared8 : Format::kSigned8;
      continue;
    }
    const at::Tensor& state = checked_state(entry, param, values.states[s], s);
    check_memory(entry, state, "its state");
    if (rule.states[s].of_all_shapes) {
      stream = array_of(laid_out_as(batch, walked, state, /*write_back=*/true));
    } else {
      stream = array_of(state.is_contiguous() ? state : contiguous_copy(batch, state));
    }
  }
  add_job(entry, reading);
}

void StepReader::check_memory(const Entry& entry, const at::Tensor& tensor, const char* what) const {
  if (tensor.device().is_meta()) return;
  if (has_own_memory(tensor) && tensor.numel() > 0 && tensor.layout() == at::kStrided &&
      tensor.storage().data() == nullptr) {
    throw UserError(text(label(entry), ": the memory of ", what,
                         " has been freed (its storage was resized to 0, as sharding wrappers do between steps): "
                         "restore it before optimizer.step()."));
  }
  if (has_own_memory(tensor)) return;
  throw UnsupportedError(text(label(entry), ": ", what,
                              " is a tensor subclass that wraps others (a DTensor of FSDP or tensor parallelism, say), "
                              "which drivetrain's optimizers do not support: use torch.optim for it."));
}

void StepReader::check_grad(const Entry& entry, const at::Tensor& param, const at::Tensor& grad) const {
  if (grad.layout() != at::kStrided) {
    throw EnvironmentError(text(
        label(entry),
        " has a sparse gradient, which this optimizer does not support: use SGD, Adagrad or torch.optim.SparseAdam "
        "for it, or sparse=False in its Embedding."));
  }
  if (grad.device() != param.device()) {
    throw UserError(text(label(entry), " is on ", param.device().str(), " but its gradient is on ", grad.device().str(),
                         ": move them together, with module.to(device)."));
  }
  if (treats_grads_ && at::has_internal_overlap(grad) == at::MemOverlap::Yes) {
    throw UserError(text(label(entry),
                         " has an expanded gradient, whose elements share memory, and this step writes gradients "
                         "(max_grad_norm, zero_grads_in_step or grad_scale): give it one of its own with .clone()."));
  }
  if (!grad.sizes().equals(param.sizes())) {
    throw UserError(text(label(entry), " has a gradient of shape ", grad.sizes(), ", expected ", param.sizes(), "."));
  }
  if (!format_of(grad.scalar_type()) || grad.is_complex() != param.is_complex() ||
      is_double(grad) != is_double(param)) {
    throw UserTypeError(text(label(entry), " is ", param.scalar_type(), " but its gradient is ", grad.scalar_type(),
                             ": expected ", param.scalar_type(), " (or, for 16-bit parameters, Float)."));
  }
}

const at::Tensor& StepReader::checked_step(const Entry& entry, const at::Tensor& param, PyObject* value) const {
  const std::string device = counter_device(param.device()).str();
  if (value == nullptr || !THPVariable_Check(value)) {
    throw UserTypeError(
        text(label(entry), ": its state has no tensor 'step'; expected a tensor with one float on ", device, "."));
  }
  const at::Tensor& step = THPVariable_Unpack(value);
  if (!is_step_counter(step, param.device())) {
    throw UserTypeError(text(label(entry), ": its state 'step' is ", step.scalar_type(), " of ", step.numel(),
                             " elements on ", step.device().str(), "; expected one float32 on ", device,
                             " (load_state_dict converts it)."));
  }
  return step;
}

const at::Tensor& StepReader::checked_state(const Entry& entry, const at::Tensor& param, PyObject* object,
                                            size_t which) const {
  const auto name = [&] { return py::handle(groups_[entry.group].rule->states[which].name).cast<std::string>(); };
  if (!THPVariable_Check(object)) {
    throw UserTypeError(text(label(entry), ": its state '", name(), "' is not a tensor."));
  }
  const at::Tensor& value = THPVariable_Unpack(object);
  const auto sizes = *state_sizes(*param.unsafeGetTensorImpl(), groups_[entry.group].rule->states[which].kind);
  if (!value.sizes().equals(sizes) || value.device() != param.device() || value.layout() != at::kStrided ||
      value.is_complex() != param.is_complex() || !format_of(value.scalar_type())) {
    throw UserTypeError(text(label(entry), ": its state '", name(), "' is ", value.scalar_type(), " of shape ",
                             value.sizes(), " on ", value.device().str(), "; expected a floating tensor of shape ",
                             at::IntArrayRef(sizes), " on ", param.device().str(), "."));
  }
  return value;
}

Batch& StepReader::batch_for(const Entry& entry, at::Device device, bool in_double) {
  const RuleInfo* rule = groups_[entry.group].rule;
  for (Batch& batch : batches) {
    if (batch.rule == rule && batch.device == device && batch.in_double == in_double) return batch;
  }
  if (!device.is_cpu() && !device.is_cuda()) {
    throw UnsupportedError(text(label(entry), " is on ", device.str(),
                                ": drivetrain's optimizers run on cpu and cuda; use torch.optim there."));
  }
  // What would stop the step later must stop it here, before anything changes.
  if (device.is_cpu()) chosen_isa();
  if (device.is_cuda() && !has_cuda()) step_cuda({}, nullptr);  // throws what to do about it
  batches.push_back(Batch{rule, device, in_double, {}, {}, 0, 0});
  return batches.back();
}

// What a rule is told of the steps before this one. One that does not count them gets 0 at a parameter's first step and
// 1 after it.
double StepReader::steps_told(const Entry& entry, double steps_done) const {
  if (groups_[entry.group].rule->counts_steps) return steps_done;
  return fresh_.count(entry.param) > 0 ? 0 : 1;
}

// The index of this parameter's RuleArgs; neighbours nearly always share theirs.
int32_t StepReader::rule_index(const Entry& entry, double steps_done) {
  const Group& group = groups_[entry.group];
  steps_done = steps_told(entry, steps_done);
  if (rule_group_ != entry.group || rule_steps_done_ != steps_done) {
    Hypers hypers = group.numbers.hypers;
    if (group.numbers.lr != nullptr) hypers.lr = number_of(PyDict_GetItemString(group.hypers.ptr(), "lr"));
    rules.push_back(group.rule->make_args(hypers, steps_done + 1));
    rule_group_ = entry.group;
    rule_steps_done_ = steps_done;
  }
  return static_cast<int32_t>(rules.size()) - 1;
}

// The same on a device, where every parameter has its own; lists from what they are made there.
int32_t StepReader::start_index(Batch& batch, const Entry& entry, const Reading& reading, uint64_t seed) {
  const Group& group = groups_[entry.group];
  if (batch.numbers_group != entry.group) {
    if (group.numbers.lr != nullptr) {
      const at::Device device = cuda_tensor(PyDict_GetItemString(group.hypers.ptr(), "lr"))->device();
      if (device != batch.device) {
        throw UserError(text(label(entry), " is on ", batch.device.str(), " but its group's lr is a tensor on ",
                             device.str(), ": move it there, or use a number."));
      }
    }
    batch.numbers.push_back(group.numbers);
    batch.numbers_group = entry.group;
  }
  ParamStart start = {};
  start.counter = reading.counter.value;
  start.counter_is_double = reading.counter.is_double;
  start.numbers = static_cast<int32_t>(batch.numbers.size()) - 1;
  start.counts_steps = group.rule->counts_steps;
  start.steps_done = steps_told(entry, reading.steps_done);
  start.seed = seed;
  (reading.job.numel > 0 ? batch.starts : batch.empty_starts).push_back(start);
  return static_cast<int32_t>(batch.starts.size()) - 1;
}

// What a user calls the parameter: its name where the optimizer was given named_parameters() or where a
// DistributedDataParallel of ours knows it, else where it stands.
std::string StepReader::label(const Entry& entry) const {
  const Group& group = groups_[entry.group];
  if (PyObject* names = PyDict_GetItemString(group.dict.ptr(), "param_names"); names != nullptr) {
    return text("parameter '",
                py::str(py::handle(names)[py::int_(static_cast<size_t>(entry.index))]).cast<std::string>(), "'");
  }
  const py::object name = py::module_::import("drivetrain.parameter_names").attr("name_of")(py::handle(entry.param));
  if (!name.is_none()) return text("parameter '", py::str(name).cast<std::string>(), "'");
  const at::Tensor& param = THPVariable_Unpack(entry.param);
  return text("parameter ", entry.index, " of param_groups[", group.index, "] (shape ", param.sizes(), ")");
}

}  // namespace drivetrain::optim
