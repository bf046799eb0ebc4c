// The optimizer step's boundary: checks everything once, turns tensors into plain jobs, picks device and instruction
// set.
#include "optim/optim.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "optim/step.h"

namespace py = pybind11;

namespace drivetrain::optim {
namespace {

struct RuleInfo {
  const char* name;
  RuleKind kind;
  bool counts_steps;  // the state holds a tensor "step"
  RuleArgs (*make_args)(const Hypers&, double step);
  std::vector<PyObject*> state_names;  // interned, never freed
};

template <template <class> class Rule>
RuleInfo rule_info(const char* name, RuleKind kind, std::initializer_list<const char*> state_names) {
  using Args = typename Rule<float>::Args;
  DT_INVARIANT(state_names.size() == Rule<float>::kNumStates);
  RuleInfo info{name,
                kind,
                Args::kCountsSteps,
                [](const Hypers& hyper, double step) { return RuleArgs::of(Args::make(hyper, step)); },
                {}};
  for (const char* state : state_names) info.state_names.push_back(PyUnicode_InternFromString(state));
  return info;
}

const RuleInfo& find_rule(const std::string& name) {
  static const std::vector<RuleInfo> rules = {
#define DT_ROW(Rule, name, ...) rule_info<Rule>(name, RuleKind::k##Rule, {__VA_ARGS__}),
      DT_OPTIM_RULES(DT_ROW)
#undef DT_ROW
  };
  for (const RuleInfo& rule : rules) {
    if (name == rule.name) return rule;
  }
  throw UserError(text("drivetrain has no optimizer rule named '", name, "'"));
}

// A group's hyper-parameters, read from the dict that the Python class made of them.
class PyHypers final : public Hypers {
 public:
  explicit PyHypers(py::handle values) : values_(values) {}

  double operator[](const char* name) const override {
    PyObject* value = PyDict_GetItemString(values_.ptr(), name);
    if (value == nullptr) throw InvariantError(text("the optimizer class gave no hyper-parameter '", name, "'"));
    const double number = PyFloat_AsDouble(value);
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return number;
  }

 private:
  py::handle values_;
};

// What a user calls the parameter: its name where the optimizer was given named_parameters(), else where it stands.
std::string label_of(py::handle group, size_t group_index, Py_ssize_t index, const at::Tensor& param) {
  if (PyObject* names = PyDict_GetItemString(group.ptr(), "param_names"); names != nullptr) {
    return text("parameter '", py::str(py::handle(names)[py::int_(index)]).cast<std::string>(), "'");
  }
  return text("parameter ", index, " of param_groups[", group_index, "] (shape ", param.sizes(), ")");
}

std::optional<Format> format_of(at::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kFloat:
      return Format::kFloat32;
    case at::kDouble:
      return Format::kFloat64;
    case at::kBFloat16:
      return Format::kBFloat16;
    case at::kHalf:
      return Format::kFloat16;
    default:
      return std::nullopt;
  }
}

// A tensor that cannot be walked as it lies (other strides than its parameter's, holes) is stepped in a copy.
struct Copy {
  at::Tensor original;  // gets the result; undefined if the copy is only read
  at::Tensor copy;
};

// What one launch updates: all parameters of one rule, device and computing type.
struct Batch {
  const RuleInfo* rule;
  at::Device device;
  bool in_double;
  std::vector<ParamJob> params;
  std::deque<Copy> copies;  // a deque, so that references into it stay good
  int64_t total = 0;
};

// Where in memory one parameter's objects lay at the last step. With thousands of small parameters a step is bound by
// the cache misses of walking them, so their lines are asked for some parameters ahead. Only ever prefetched: an
// address that is no longer true costs nothing.
struct Footprint {
  static constexpr int kMaxTensors = 3 + kMaxStates;  // parameter, gradient, step, states
  int num_objects = 0, num_tensors = 0;
  const void* objects[4 + kMaxStates] = {};  // Python's: parameter, state dict and its keys, step, states
  const void* tensors[kMaxTensors] = {};     // c10::TensorImpl
  const void* storages[kMaxTensors] = {};    // c10::StorageImpl
  const void* data[kMaxTensors] = {};

  void add_object(const void* object) { objects[num_objects++] = object; }

  void add(const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    tensors[num_tensors] = impl;
    storages[num_tensors] = impl->unsafe_storage().unsafeGetStorageImpl();
    data[num_tensors] = tensor.const_data_ptr();
    ++num_tensors;
  }

  void prefetch() const {
    constexpr int kLine = 64;
    const auto lines = [](const void* address, int count) {
      for (int i = 0; i < count; ++i) __builtin_prefetch(static_cast<const char*>(address) + i * kLine);
    };
    for (int i = 0; i < num_objects; ++i) lines(objects[i], 1);
    for (int i = 0; i < num_tensors; ++i) {
      lines(tensors[i], static_cast<int>(sizeof(c10::TensorImpl)) / kLine + 1);
      lines(storages[i], 1);
      lines(data[i], 1);
    }
  }
};

// The footprints of all parameters of one optimizer, in the order of its groups.
struct Footprints {
  std::vector<Footprint> of_params;
};

// Reads one step's parameters, gradients and states out of Python and checks them all before anything changes.
class StepReader {
 public:
  // fresh: parameters whose state was initialised for this very step.
  StepReader(const py::dict& state, const py::list& fresh, Footprints& footprints)
      : state_(state), fresh_(fresh), footprints_(footprints.of_params) {}

  void read_group(py::handle group, size_t group_index, const RuleInfo& rule, py::handle hypers) {
    group_ = group;
    group_index_ = group_index;
    rule_ = &rule;
    hypers_ = hypers;
    rule_step_ = -1;
    PyObject* params = PyDict_GetItemString(group.ptr(), "params");
    DT_INVARIANT(params != nullptr && PyList_Check(params));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i, ++position_) {
      constexpr size_t kAhead = 8;
      if (position_ + kAhead < footprints_.size()) footprints_[position_ + kAhead].prefetch();
      if (position_ == footprints_.size()) footprints_.emplace_back();
      footprint_ = Footprint();
      read_param(PyList_GET_ITEM(params, i), i);
      footprints_[position_] = footprint_;
    }
  }

  py::list missing;  // (parameter, index of its group): has a gradient but not all of its state
  std::vector<Batch> batches;
  std::vector<RuleArgs> rules;
  std::vector<std::pair<void*, bool>> steps;  // step counters to advance; true: float64
  std::vector<c10::TensorImpl*> written;      // whose version autograd must see change; Python keeps them alive

 private:
  void read_param(PyObject* object, Py_ssize_t index) {
    const at::Tensor& param = THPVariable_Unpack(object);
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) return;
    check_grad(param, grad, index);
    footprint_.add_object(object);
    footprint_.add(param);
    footprint_.add(grad);
    State state;
    if (!rule_->state_names.empty() && !read_state(object, param, index, &state)) {
      missing.append(py::make_tuple(py::handle(object), group_index_));
      return;
    }
    Batch& batch = batch_for(param, index);
    ParamJob job = {};
    job.numel = param.numel() * (param.is_complex() ? 2 : 1);
    job.rule = rule_index(state, object);
    if (job.numel == 0) return;
    job.begin = batch.total;
    const at::Tensor& walked = param.is_non_overlapping_and_dense() ? param : contiguous_copy(batch, param);
    job.param = stream_of(walked);
    job.grad = stream_of(laid_out_as(batch, walked, grad, /*write_back=*/false));
    for (size_t s = 0; s < rule_->state_names.size(); ++s) {
      job.state[s] = stream_of(laid_out_as(batch, walked, *state.tensors[s], /*write_back=*/true));
    }
    written.push_back(param.unsafeGetTensorImpl());
    batch.params.push_back(job);
    batch.total += job.numel;
  }

  // One parameter's state, checked.
  struct State {
    const at::Tensor* tensors[kMaxStates] = {};
    double step = 0;  // the step number that this step makes, where the rule counts
  };

  // False if the state, or part of it, is yet to be initialised. (torch's own classes leave entries that are None, as
  // SGD's first momentum_buffer, or absent, as when amsgrad is switched on later.)
  bool read_state(PyObject* object, const at::Tensor& param, Py_ssize_t index, State* state) {
    static PyObject* const step_name = PyUnicode_InternFromString("step");
    PyObject* values = find_state(object);
    if (values == nullptr) return false;
    footprint_.add_object(values);
    footprint_.add_object(reinterpret_cast<PyDictObject*>(values)->ma_keys);
    for (size_t s = 0; s < rule_->state_names.size(); ++s) {
      PyObject* value = PyDict_GetItemWithError(values, rule_->state_names[s]);
      if (value == nullptr || value == Py_None) return false;
      footprint_.add_object(value);
      state->tensors[s] = &checked_state(value, s, param, index);
      footprint_.add(*state->tensors[s]);
    }
    if (rule_->counts_steps) state->step = 1 + read_step(PyDict_GetItemWithError(values, step_name), param, index);
    return true;
  }

  // state[param], without Python-level hashing in the usual case that the dict is in the parameters' order.
  PyObject* find_state(PyObject* param) {
    constexpr int kLookAhead = 4;  // parameters without a gradient leave entries to skip
    Py_ssize_t position = state_position_;
    PyObject *key = nullptr, *value = nullptr;
    for (int i = 0; i < kLookAhead && PyDict_Next(state_.ptr(), &position, &key, &value); ++i) {
      if (key == param) {
        state_position_ = position;
        return PyDict_Check(value) ? value : nullptr;
      }
    }
    value = PyDict_GetItemWithError(state_.ptr(), param);
    if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value != nullptr && PyDict_Check(value) ? value : nullptr;
  }

  void check_grad(const at::Tensor& param, const at::Tensor& grad, Py_ssize_t index) const {
    if (grad.layout() != at::kStrided) {
      throw EnvironmentError(
          text(label(param, index), " has a sparse gradient, which ", rule_->name,
               " does not support: use torch.optim.SparseAdam for it, or sparse=False in its Embedding."));
    }
    if (grad.device() != param.device()) {
      throw UserError(text(label(param, index), " is on ", param.device().str(), " but its gradient is on ",
                           grad.device().str(), ": move them together, with module.to(device)."));
    }
    if (!grad.sizes().equals(param.sizes())) {
      throw UserError(
          text(label(param, index), " has a gradient of shape ", grad.sizes(), ", expected ", param.sizes(), "."));
    }
    const auto is_double = [](const at::Tensor& t) { return c10::toRealValueType(t.scalar_type()) == at::kDouble; };
    if (!format_of(grad.scalar_type()) || grad.is_complex() != param.is_complex() || is_double(grad) != is_double(param)) {
      throw UserTypeError(text(label(param, index), " is ", param.scalar_type(), " but its gradient is ",
                               grad.scalar_type(), ": expected ", param.scalar_type(),
                               " (or, for 16-bit parameters, Float)."));
    }
  }

  Batch& batch_for(const at::Tensor& param, Py_ssize_t index) {
    const at::Device device = param.device();
    const bool in_double = c10::toRealValueType(param.scalar_type()) == at::kDouble;
    for (Batch& batch : batches) {
      if (batch.rule == rule_ && batch.device == device && batch.in_double == in_double) return batch;
    }
    if (!device.is_cpu() && !device.is_cuda()) {
      throw UnsupportedError(text(label(param, index), " is on ", device.str(),
                                  ": drivetrain's optimizers run on cpu and cuda; use torch.optim there."));
    }
    batches.push_back(Batch{rule_, device, in_double, {}, {}, 0});
    return batches.back();
  }

  // The index of this parameter's RuleArgs; neighbours nearly always share theirs.
  int32_t rule_index(const State& state, PyObject* param) {
    double step = state.step;
    if (!rule_->counts_steps) {
      // Such rules are told 1 on a parameter's first step and 2 after it.
      step = 2;
      for (const py::handle& fresh : fresh_) {
        if (fresh.ptr() == param) step = 1;
      }
    }
    if (step != rule_step_) {
      rules.push_back(rule_->make_args(PyHypers(hypers_), step));
      rule_step_ = step;
    }
    return static_cast<int32_t>(rules.size()) - 1;
  }

  // The counter's value; it is written only once everything is checked.
  double read_step(PyObject* object, const at::Tensor& param, Py_ssize_t index) {
    if (object == nullptr || !THPVariable_Check(object)) {
      throw UserTypeError(
          text(label(param, index), ": its state has no tensor 'step'; expected a CPU tensor with one float."));
    }
    const at::Tensor& step = THPVariable_Unpack(object);
    const bool is_double = step.scalar_type() == at::kDouble;
    if (!step.device().is_cpu() || step.numel() != 1 || !(is_double || step.scalar_type() == at::kFloat)) {
      throw UserTypeError(text(label(param, index), ": its state 'step' is ", step.scalar_type(), " of ", step.numel(),
                               " elements on ", step.device().str(),
                               "; expected one float32 on cpu (load_state_dict converts it)."));
    }
    footprint_.add_object(object);
    footprint_.add(step);
    void* data = step.data_ptr();
    steps.emplace_back(data, is_double);
    return is_double ? *static_cast<double*>(data) : static_cast<double>(*static_cast<float*>(data));
  }

  const at::Tensor& checked_state(PyObject* object, size_t s, const at::Tensor& param, Py_ssize_t index) const {
    const auto name = [&] { return py::handle(rule_->state_names[s]).cast<std::string>(); };
    if (!THPVariable_Check(object)) {
      throw UserTypeError(text(label(param, index), ": its state '", name(), "' is not a tensor."));
    }
    const at::Tensor& value = THPVariable_Unpack(object);
    if (!value.sizes().equals(param.sizes()) || value.device() != param.device() || value.layout() != at::kStrided ||
        value.is_complex() != param.is_complex() || !format_of(value.scalar_type())) {
      throw UserTypeError(text(label(param, index), ": its state '", name(), "' is ", value.scalar_type(), " of shape ",
                               value.sizes(), " on ", value.device().str(), "; expected a floating tensor of shape ",
                               param.sizes(), " on ", param.device().str(), "."));
    }
    return value;
  }

  Stream stream_of(const at::Tensor& tensor) const {
    const std::optional<Format> format = format_of(tensor.scalar_type());
    if (!format) {
      throw UserTypeError(
          text("drivetrain's optimizers update float32, float64, bfloat16, float16 and complex parameters; got ",
               tensor.scalar_type(), "."));
    }
    return Stream{tensor.data_ptr(), *format};
  }

  static const at::Tensor& contiguous_copy(Batch& batch, const at::Tensor& tensor) {
    batch.copies.push_back({tensor, tensor.detach().clone(at::MemoryFormat::Contiguous)});
    return batch.copies.back().copy;
  }

  // `value` itself if it lies in memory as `like` does, else a copy that does (written back after the step if asked).
  static const at::Tensor& laid_out_as(Batch& batch, const at::Tensor& like, const at::Tensor& value, bool write_back) {
    const bool same = (like.is_contiguous() && value.is_contiguous()) || like.strides().equals(value.strides());
    if (same && !value.is_conj() && !value.is_neg()) return value;
    at::Tensor copy = at::empty_strided(like.sizes(), like.strides(), value.options());
    copy.copy_(value.detach());
    batch.copies.push_back({write_back ? value : at::Tensor(), copy});
    return batch.copies.back().copy;
  }

  std::string label(const at::Tensor& param, Py_ssize_t index) const {
    return label_of(group_, group_index_, index, param);
  }

  const py::dict& state_;
  const py::list& fresh_;
  std::vector<Footprint>& footprints_;
  size_t position_ = 0;  // of the parameter being read, over all groups
  Footprint footprint_;
  Py_ssize_t state_position_ = 0;
  // The group being read.
  const RuleInfo* rule_ = nullptr;
  py::handle group_, hypers_;
  size_t group_index_ = 0;
  double rule_step_ = -1;  // the step that rules.back() was made for; -1: none yet in this group
};

void run_cpu(const StepJob& job) {
  void (*step)(const StepJob&, int64_t, int64_t) = nullptr;
  switch (chosen_isa()) {
    case Isa::kBaseline:
      step = baseline::step_cpu;
      break;
    case Isa::kAvx2:
      step = avx2::step_cpu;
      break;
    case Isa::kAvx512:
      step = avx512::step_cpu;
      break;
  }
  constexpr int64_t kGrain = 1 << 15;  // elements that are worth a thread
  at::parallel_for(0, job.total, kGrain, [&](int64_t begin, int64_t end) { step(job, begin, end); });
}

// How many threads a large step really runs on. (1 in a build without OpenMP, whatever torch.get_num_threads() says.)
int num_step_threads() {
  std::atomic<int> threads{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) { ++threads; });
  return threads;
}

// Copies the job's tables to the device, on its current stream, and launches there.
void run_cuda(StepJob job, const Batch& batch, const std::vector<RuleArgs>& rules) {
  const c10::DeviceGuard guard(batch.device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(batch.device.type()).getStream(batch.device);
  const size_t params_bytes = batch.params.size() * sizeof(ParamJob), rules_bytes = rules.size() * sizeof(RuleArgs);
  at::Tensor table = at::empty({static_cast<int64_t>(params_bytes + rules_bytes)}, at::kByte);
  std::memcpy(table.data_ptr(), batch.params.data(), params_bytes);
  std::memcpy(static_cast<char*>(table.data_ptr()) + params_bytes, rules.data(), rules_bytes);
  // From pageable memory the copy has left `table` when it returns, without waiting for the device's queue.
  const at::Tensor on_device = table.to(batch.device, /*non_blocking=*/true);
  job.params = static_cast<const ParamJob*>(on_device.data_ptr());
  job.rules = reinterpret_cast<const RuleArgs*>(static_cast<const char*>(on_device.data_ptr()) + params_bytes);
  step_cuda(job, stream.native_handle());
}

// What has been read and checked, done: counters, versions, launches. Needs no GIL.
void run(const StepReader& read) {
  for (const auto& [counter, is_double] : read.steps) {
    if (is_double) {
      *static_cast<double*>(counter) += 1;
    } else {
      *static_cast<float*>(counter) += 1;
    }
  }
  for (c10::TensorImpl* tensor : read.written) tensor->bump_version();
  for (const Batch& batch : read.batches) {
    StepJob job = {};
    job.kind = batch.rule->kind;
    job.in_double = batch.in_double;
    job.params = batch.params.data();
    job.num_params = static_cast<int32_t>(batch.params.size());
    job.rules = read.rules.data();
    job.total = batch.total;
    if (batch.device.is_cpu()) {
      run_cpu(job);
    } else {
      run_cuda(job, batch, read.rules);
    }
    for (const Copy& copy : batch.copies) {
      if (copy.original.defined()) copy.original.detach().copy_(copy.copy);
    }
  }
}

// Makes one step over all groups, rules[i] and hypers[i] being groups[i]'s; or, if parameters lack state, returns them
// (each with its group's index) and has changed nothing. See optim/base.py, the only caller.
py::list step(const py::list& groups, const std::vector<std::string>& rules, const py::list& hypers,
              const py::dict& state, const py::list& fresh, Footprints& footprints) {
  StepReader reader(state, fresh, footprints);
  for (size_t i = 0; i < groups.size(); ++i) reader.read_group(groups[i], i, find_rule(rules[i]), hypers[i]);
  if (reader.missing.empty()) {
    const py::gil_scoped_release no_gil;
    run(reader);
  }
  return reader.missing;
}

}  // namespace

void register_optim(py::module_& m) {
  py::class_<Footprints>(m, "Footprints").def(py::init());
  m.def("optim_step", &step, py::arg("groups"), py::arg("rules"), py::arg("hypers"), py::arg("state"), py::arg("fresh"),
        py::arg("footprints"));
  m.def(
      "optim_state_names",
      [](const std::string& rule) {
        const RuleInfo& info = find_rule(rule);
        std::vector<std::string> names;
        if (info.counts_steps) names.emplace_back("step");
        for (PyObject* name : info.state_names) names.push_back(py::handle(name).cast<std::string>());
        return names;
      },
      py::arg("rule"));
  m.def("num_step_threads", &num_step_threads);
  m.def("has_cuda", &has_cuda);
}

}  // namespace drivetrain::optim
