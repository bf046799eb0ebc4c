// Collects the parameters of a step and places them into batches; see step_reader.h.
#include "optim/step_reader.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "base/torch_text.h"
#include "formats/storage_torch.h"
#include "formats/summation.h"
#include "optim/hypers.h"
#include "optim/python_values.h"
#include "optim/tensor_checks.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

constexpr const char* kPlaces = "_drivetrain_places";  // as python/drivetrain/optim/rule.py calls it

// Reads a group's hyper-parameters from the dict of the Python class. A learning rate on a device stays there; reading
// another number there waits for the device. `index` is the group's.
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

}  // namespace

void StepReader::begin(const py::dict& state, const py::list& fresh, bool writes_grads) {
  state_ = state;
  writes_grads_ = writes_grads;
  fresh_.clear();
  for (const py::handle& param : fresh) fresh_.insert(param.ptr());
  missing = py::list();
  has_wrappers = false;
}

void StepReader::end() {
  for (Batch& batch : batches) {
    batch.params.clear();
    batch.written_of.clear();
    batch.copies.clear();
    batch.total = batch.num_chunks = 0;
    batch.starts.clear();
    batch.empty_starts.clear();
    batch.numbers.clear();
    batch.numbers_group = -1;
    batch.muon = {};
  }
  rules.clear();
  written.clear();
  advanced_scalars.clear();
  entry_of_.clear();
  rule_group_ = -1;
  state_ = py::handle();
  state_position_ = 0;
  states_by_param_.clear();
  entries_.clear();
  groups_.clear();
  owns_ = false;
  owned_storages_.clear();
  owned_tensors_.clear();
  owned_objects_.clear();
}

void StepReader::own() const {
  if (owns_) return;
  owns_ = true;
  for (const Entry& entry : entries_) own(entry);
}

// Takes references to a parameter, its gradient and its state, and to their memory, which `tensor.data = other` frees.
void StepReader::own(const Entry& entry) const {
  const auto own_object = [&](PyObject* object) {
    if (object != nullptr) owned_objects_.push_back(py::reinterpret_borrow<py::object>(object));
  };
  const auto own_tensor = [&](const at::Tensor& tensor) {
    owned_tensors_.push_back(tensor);
    if (tensor.has_storage()) owned_storages_.push_back(tensor.storage());
  };
  own_object(entry.param);
  own_object(entry.state);
  const at::Tensor& param = THPVariable_Unpack(entry.param);
  own_tensor(param);
  const at::Tensor& grad = param.grad();
  if (!grad.defined()) return;
  own_tensor(grad);
  const StateValues values = state_values(entry);
  const auto own_value = [&](PyObject* value) {
    own_object(value);
    if (value != nullptr && THPVariable_Check(value)) own_tensor(THPVariable_Unpack(value));
  };
  own_value(values.step);
  own_value(values.extra);
  for (PyObject* scalar : values.scalars) own_value(scalar);
  for (PyObject* state : values.states) own_value(state);
  for (PyObject* scales : values.scales) own_value(scales);
}

void StepReader::add_group(py::handle group, size_t index, const RuleInfo& rule, py::handle hypers,
                           const Precision& precision) {
  check_hypers(hypers, index);
  groups_.push_back({py::reinterpret_borrow<py::object>(group), index, &rule,
                     py::reinterpret_borrow<py::object>(hypers), precision,
                     rule.counts_steps || precision.rounding == Rounding::kStochastic, numbers_of(hypers, index)});
}

// Looks up all parameters and their states. Runs no Python code, not even the hash of a tensor.
void StepReader::find_entries() {
  for (size_t i = 0; i < groups_.size(); ++i) {
    PyObject* params = PyDict_GetItemString(groups_[i].dict.ptr(), "params");
    DT_INVARIANT(params != nullptr && PyList_Check(params));
    PyObject* places = PyDict_GetItemString(groups_[i].dict.ptr(), kPlaces);
    DT_INVARIANT(places == nullptr || PyList_GET_SIZE(places) == PyList_GET_SIZE(params));
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(params); ++k) {
      PyObject* param = PyList_GET_ITEM(params, k);
      const auto index = static_cast<uint32_t>(k);
      const auto place =
          places == nullptr ? index : static_cast<uint32_t>(PyLong_AsUnsignedLong(PyList_GET_ITEM(places, k)));
      entries_.push_back({param, find_state(param), static_cast<uint32_t>(i), index, place});
    }
  }
}

// Returns state[param], or null. Usually the dict is in the parameters' order; otherwise a map finds tensors by
// identity, which is how tensors compare as keys.
PyObject* StepReader::find_state(PyObject* param) {
  constexpr int kLookAhead = 4;  // Parameters without a gradient may lack an entry or have one to skip.
  Py_ssize_t position = state_position_;
  PyObject *key = nullptr, *value = nullptr;
  for (int i = 0; i < kLookAhead && PyDict_Next(state_.ptr(), &position, &key, &value); ++i) {
    if (key == param) {
      state_position_ = position;
      return value;
    }
  }
  if (states_by_param_.empty()) {
    position = 0;
    while (PyDict_Next(state_.ptr(), &position, &key, &value)) states_by_param_.emplace(key, value);
  }
  const auto found = states_by_param_.find(param);
  return found == states_by_param_.end() ? nullptr : found->second;
}

// Throws for memory that two parameters share, because two threads would write it at once.
void StepReader::check_apart() {
  memory_.clear();
  const auto add = [&](const c10::TensorImpl* tensor, size_t owner, bool is_grad) {
    // Other layouts cannot be compared cheaply: x[::2] and x[1::2] do not overlap.
    if (tensor->numel() == 0 || !tensor->is_non_overlapping_and_dense()) return;
    const char* begin = static_cast<const char*>(tensor->unsafe_storage().data()) +
                        tensor->storage_offset() * static_cast<int64_t>(tensor->itemsize());
    memory_.push_back({begin, begin + tensor->numel() * tensor->itemsize(), static_cast<uint32_t>(owner), is_grad});
  };
  const auto add_plain = [&](const TypedArray& stream, int64_t numel, size_t owner, bool is_grad) {
    const char* begin = static_cast<const char*>(stream.data);
    memory_.push_back({begin, begin + data_bytes(stream.format, numel), static_cast<uint32_t>(owner), is_grad});
  };
  for (size_t i = 0; i < written.size(); ++i) {
    const Reading& reading = readings_[entry_of_[i]];
    if (reading.kind ==
        Kind::kPlain) {  // Not read from the tensors, because thousands of them are no longer in the cache.
      add_plain(reading.job.param, reading.job.numel, i, false);
      if (writes_grads_) add_plain(reading.job.grad, reading.job.numel, i, true);
    } else {
      add(written[i].param, i, false);
      if (writes_grads_) add(written[i].grad, i, true);
    }
  }
  if (memory_ == known_as_apart_) return;  // This is the case in most steps.
  known_as_apart_ = memory_;
  std::sort(memory_.begin(), memory_.end(),
            [](const WrittenMemory& a, const WrittenMemory& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < memory_.size(); ++i) {
    if (memory_[i].begin >= memory_[i - 1].end) continue;
    known_as_apart_.clear();
    throw UserError(why_together(memory_[i - 1], memory_[i]));
  }
}

const StepReader::Entry& StepReader::entry_of(const WrittenMemory& memory) const {
  return entries_[entry_of_[memory.owner]];
}

// Describes two pieces of memory that overlap.
std::string StepReader::why_together(const WrittenMemory& first, const WrittenMemory& second) const {
  const bool in_order = first.owner < second.owner;
  const Entry &a = entry_of(in_order ? first : second), &b = entry_of(in_order ? second : first);
  if (first.owner == second.owner) {
    return text(label(a),
                " and its gradient share memory, and this step writes gradients (max_grad_norm, zero_grads_in_step or "
                "grad_scale). Give it a gradient of its own with .clone().");
  }
  if (a.param == b.param) {
    return text(label(b), " is in its group twice (it is ", label(a), " too): leave one of the two out.");
  }
  if (!first.is_grad && !second.is_grad) {
    return text(label(a), " and ", label(b), " share memory: give the optimizer one of them.");
  }
  return text(label(a), " and ", label(b),
              " share the memory of a gradient, and this step writes gradients (max_grad_norm, zero_grads_in_step or "
              "grad_scale). Give each a gradient of its own with .clone().");
}

void StepReader::add_job(const Entry& entry, const Reading& reading) {
  const Group& group = groups_[entry.group];
  Batch& batch = batch_for(entry, reading.device, reading.in_double);
  ParamJob job = reading.job;
  for (size_t s = 0; s < group.rule->states.size(); ++s) {
    if (job.state[s].extra != nullptr) batch.total = num_blocks(batch.total) * kBlock;
  }
  job.begin = batch.total;
  const bool is_random = group.precision.rounding == Rounding::kStochastic;
  const uint64_t seed = is_random ? mixed(static_cast<uint64_t>(group.index) << 32 | entry.place) : 0;
  if (batch.device.is_cuda()) {
    job.rule = start_index(batch, entry, reading, seed);
  } else {
    job.rule = rule_index(entry, reading);
    if (group.rule->advance != nullptr) advance_scalars(entry, reading);
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

Batch& StepReader::batch_for(const Entry& entry, at::Device device, bool in_double) {
  const RuleInfo* rule = groups_[entry.group].rule;
  for (Batch& batch : batches) {
    if (batch.rule == rule && batch.device == device && batch.in_double == in_double) return batch;
  }
  if (!device.is_cpu() && !device.is_cuda()) {
    throw UnsupportedError(text(label(entry), " is on ", device.str(),
                                ": drivetrain's optimizers run on cpu and cuda; use torch.optim there."));
  }
  // Errors that would stop the step later must occur here, before anything changes.
  if (device.is_cpu()) chosen_isa();
  if (device.is_cuda() && !has_cuda()) step_cuda({}, nullptr);  // throws with the remedy
  batches.push_back(Batch{rule, device, in_double, {}, {}, 0, 0});
  return batches.back();
}

// Returns the number of steps done that the rule sees. A rule that does not count steps gets 0 at a parameter's first
// step and 1 later.
double StepReader::steps_told(const Entry& entry, double steps_done) const {
  if (groups_[entry.group].rule->counts_steps) return steps_done;
  return fresh_.count(entry.param) > 0 ? 0 : 1;
}

Hypers StepReader::hypers_of(const Group& group) {
  Hypers hypers = group.numbers.hypers;
  if (group.numbers.lr != nullptr) hypers.lr = number_of(PyDict_GetItemString(group.hypers.ptr(), "lr"));
  return hypers;
}

// Returns the index of the parameter's RuleArgs; neighbors nearly always share theirs.
int32_t StepReader::rule_index(const Entry& entry, const Reading& reading) {
  const Group& group = groups_[entry.group];
  const double steps_done = steps_told(entry, reading.steps_done);
  Scalars scalars;
  for (size_t s = 0; s < group.rule->scalars.size(); ++s) {
    scalars.value[s] = optim::steps_done(reading.scalars[s]);
    scalars.is_double[s] = reading.scalars[s].is_double;
  }
  if (rule_group_ != entry.group || rule_steps_done_ != steps_done || rule_scalars_ != scalars) {
    const Hypers hypers = hypers_of(group);
    rules.push_back(group.rule->make_args(hypers, steps_done + 1, scalars));
    rule_group_ = entry.group;
    rule_steps_done_ = steps_done;
    rule_scalars_ = advanced_ = scalars;
    if (group.rule->advance != nullptr) group.rule->advance(hypers, steps_done + 1, advanced_);
  }
  return static_cast<int32_t>(rules.size()) - 1;
}

// Remembers the parameter's scalars after the step, which rule_index() has computed.
void StepReader::advance_scalars(const Entry& entry, const Reading& reading) {
  for (size_t s = 0; s < groups_[entry.group].rule->scalars.size(); ++s) {
    advanced_scalars.push_back({reading.scalars[s], advanced_.value[s]});
  }
}

// Returns the index of the parameter's RuleArgs on a device, where every parameter has its own. Adds the data that they
// are computed from.
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
  for (size_t s = 0; s < group.rule->scalars.size(); ++s) {
    start.scalars[s] = reading.scalars[s].value;
    start.scalars_are_double[s] = reading.scalars[s].is_double;
  }
  (reading.job.numel > 0 ? batch.starts : batch.empty_starts).push_back(start);
  return static_cast<int32_t>(batch.starts.size()) - 1;
}

// Returns the parameter's name if the optimizer was given named_parameters() or drivetrain's DistributedDataParallel
// knows it, else its position. Python code may run.
std::string StepReader::label(const Entry& entry) const {
  own();
  const Group& group = groups_[entry.group];
  if (PyObject* names = PyDict_GetItemString(group.dict.ptr(), "param_names"); names != nullptr) {
    return text("parameter '",
                py::str(py::handle(names)[py::int_(static_cast<size_t>(entry.index))]).cast<std::string>(), "'");
  }
  const py::object name =
      py::module_::import("drivetrain.ddp.parameter_names").attr("name_of")(py::handle(entry.param));
  if (!name.is_none()) return text("parameter '", py::str(name).cast<std::string>(), "'");
  const at::Tensor& param = THPVariable_Unpack(entry.param);
  return text("parameter ", entry.place, " of param_groups[", group.index, "] (shape ", param.sizes(), ")");
}

}  // namespace drivetrain::optim
