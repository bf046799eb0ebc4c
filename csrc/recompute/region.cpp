// Calls a function without keeping its saved tensors, and calls it again in backward; see region.h.
#include "recompute/region.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "base/check.h"
#include "base/hash.h"
#include "recompute/hooks.h"
#include "recompute/recompute.h"
#include "trace/span.h"

namespace py = pybind11;

namespace drivetrain::recompute {
namespace {

constexpr const char* kRegion = "drivetrain.Region";
constexpr const char* kTicket = "drivetrain.Ticket";
constexpr const char* kRecomputation = "drivetrain.Recomputation";

// Operations such as RNNs and normalizations save workspaces, which they do not write completely.
bool is_workspace(const at::Tensor& tensor) { return tensor.scalar_type() == at::kByte && tensor.dim() == 1; }

// Returns whether a recomputed tensor has the memory of the saved one, which has outlived the forward pass.
bool has_outlived(const SavedMetadata& before, const at::Tensor& now) {
  return before.storage && now.has_storage() &&
         before.storage->_unsafe_get_target() == now.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Returns whether the operation that saves the tensor may write it afterwards, as RReLU does with its noise.
bool may_be_filled(const SavedMetadata& before, const at::Tensor& now) {
  return now.is_floating_point() && !now.requires_grad() && now._version() == 0 && !has_outlived(before, now);
}

// Returns torch's GraphExecGroup of the current backward, or None.
py::object current_group() {
  static const auto* get = new py::object(py::getattr(py::module_::import("torch._C"), "_get_graph_exec_group",
                                                      py::none()));  // leaked: it may outlive Python
  return get->is_none() ? py::none() : (*get)();
}

// Returns the exception type that ends a recomputation early. It derives from BaseException, so that handlers in the
// function let it pass.
PyObject* recomputation_stopped() {
  static PyObject* const type = PyErr_NewException("drivetrain._C.RecomputationStopped", PyExc_BaseException, nullptr);
  return type;
}

}  // namespace

uint64_t hash_of(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.unsafeGetTensorImpl()->is_python_dispatch(),
                              "verify=True cannot hash the values of a saved tensor subclass: checkpoint functions "
                              "that work on plain tensors, or pass verify=False");
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  at::Tensor values = tensor.detach();
  if (values.layout() != at::kStrided) values = values.to_dense();
  values = values.resolve_conj().resolve_neg().cpu().contiguous();
  return hash_bytes(values.const_data_ptr(), static_cast<int64_t>(values.nbytes()));
}

SavedMetadata::SavedMetadata(const at::Tensor& tensor)
    : sizes(tensor.sym_sizes()),
      dtype(tensor.scalar_type()),
      device(tensor.device()),
      version(tensor._version()),
      grad_fn(nullptr) {
  if (tensor.has_storage()) storage = tensor.storage().getWeakStorageImpl();
  if (const auto& node = tensor.grad_fn()) grad_fn = &typeid(*node);
}

struct CheckpointRegion::Ticket {
  Ticket(std::shared_ptr<CheckpointRegion> region, size_t index) : region(std::move(region)), index(index) {}
  Ticket(Ticket&&) = default;
  ~Ticket() {
    if (!region) return;
    region->saved_[index].is_wanted = false;
    region->saved_[index].value.reset();
  }

  std::shared_ptr<CheckpointRegion> region;
  size_t index;
};

// One call of the function in backward, up to the last tensor that its forward saved.
class CheckpointRegion::Recomputation {
 public:
  // Gives the region the values that its graph still refers to.
  static void run(CheckpointRegion& region);

 private:
  explicit Recomputation(CheckpointRegion& region)
      : region_(region.shared_from_this()), num_expected_(region.saved_.size()), values_(num_expected_) {}

  static PyObject* pack(PyObject* recomputation, PyObject* tensor);
  static PyObject* unpack(PyObject* unused, PyObject* tensor) { return Py_NewRef(tensor); }

  void call_function(const std::shared_ptr<Recomputation>& self);
  // Returns the tensor for the recomputed graph to save, because the function may run a backward of its own. Sets
  // is_stopped_ when no more tensors are needed.
  at::Tensor take(const at::Tensor& tensor);
  std::string difference(size_t index, const at::Tensor& tensor) const;
  [[noreturn]] void fail(std::string failure);

  const std::shared_ptr<CheckpointRegion> region_;
  const size_t num_expected_;
  struct RecomputedValue {
    at::Tensor tensor;
    int64_t version = 0;
  };
  std::vector<RecomputedValue> values_;
  size_t num_taken_ = 0;
  bool is_stopped_ = false;
  bool may_be_filled_ = false;  // the tensor taken last
  std::string failure_;
};

PyObject* CheckpointRegion::pack(PyObject* region, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return value_in<std::shared_ptr<CheckpointRegion>>(region, kRegion)->save(THPVariable_Unpack(tensor)).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* CheckpointRegion::unpack(PyObject*, PyObject* ticket) {
  HANDLE_TH_ERRORS
  const Ticket& of = value_in<Ticket>(ticket, kTicket);
  const std::shared_ptr<CheckpointRegion> region = of.region;
  return THPVariable_Wrap(region->value_of(of.index));
  END_HANDLE_TH_ERRORS
}

PyObject* CheckpointRegion::Recomputation::pack(PyObject* recomputation, PyObject* tensor) {
  HANDLE_TH_ERRORS
  auto& self = *value_in<std::shared_ptr<Recomputation>>(recomputation, kRecomputation);
  const at::Tensor kept = self.take(THPVariable_Unpack(tensor));
  if (!self.is_stopped_) return THPVariable_Wrap(kept);
  PyErr_SetNone(recomputation_stopped());
  return nullptr;
  END_HANDLE_TH_ERRORS
}

CheckpointRegion::CheckpointRegion(py::object function, py::tuple args, py::dict kwargs, RegionOptions options)
    : function_(std::move(function)),
      inputs_(std::in_place, std::move(args), std::move(kwargs)),
      options_(options),
      random_states_(options.preserve_rng_state ? std::optional(RandomStates::now()) : std::nullopt),
      autocast_(Autocast::now()),
      switches_(Switches::now()),
      group_(py::none()) {}

py::object CheckpointRegion::run(py::object function, py::tuple args, py::dict kwargs, RegionOptions options) {
  static PyMethodDef pack_method{"pack", &CheckpointRegion::pack, METH_O, nullptr};
  static PyMethodDef unpack_method{"unpack", &CheckpointRegion::unpack, METH_O, nullptr};
  const auto region = std::make_shared<CheckpointRegion>(function, args, kwargs, options);
  py::object result;
  {
    const HooksGuard hooks(&pack_method, capsule(region, kRegion), &unpack_method);
    result = function(*args, **kwargs);
  }
  region->end_forward();
  return result;
}

py::object CheckpointRegion::save(const at::Tensor& tensor) {
  SavedMetadata saved(tensor);
  if (options_.verify) {
    if (!is_workspace(tensor)) saved.hash = hash_of(tensor);
    saved.location = current_location();
  }
  saved_.push_back(std::move(saved));
  return capsule(Ticket(shared_from_this(), saved_.size() - 1), kTicket);
}

void CheckpointRegion::end_forward() {
  if (!saved_.empty()) {  // otherwise backward recomputes nothing
    const std::string written = inputs_->first_written();
    if (!written.empty()) failure_ = input_written(written);
    if (random_states_ && random_states_->num_devices() < RandomStates::num_devices_now()) {
      failure_ = device_initialized();
    }
  }
  has_ended_ = true;
  if (failure_.empty()) return;
  inputs_.reset();  // breaks a reference cycle: an argument that was written refers to the graph
  throw_checkpoint_error(failure_);
}

at::Tensor CheckpointRegion::value_of(size_t index) {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  py::object group = current_group();
  const bool is_same = group.is(group_) && (!group.is_none() || (graph_task == graph_task_ && graph_task != -1));
  if (!is_same || !saved_[index].value.defined()) {
    recompute();
    graph_task_ = graph_task;
    group_ = std::move(group);
  }
  const at::Tensor value = std::move(saved_[index].value);  // freed here even if the graph is retained
  DT_INVARIANT(value.defined());
  if (value._version() != saved_[index].value_version) throw_checkpoint_error(value_written(index));
  return value;
}

void CheckpointRegion::recompute() {
  if (!failure_.empty()) throw_checkpoint_error(failure_);
  const std::string written = inputs_->first_written();
  if (!written.empty()) throw_checkpoint_error(input_written(written));
  const trace::RecomputationTally tally;
  Recomputation::run(*this);
}

void CheckpointRegion::Recomputation::run(CheckpointRegion& region) {
  const std::shared_ptr<Recomputation> self(new Recomputation(region));
  self->call_function(self);
  if (!self->failure_.empty()) throw_checkpoint_error(self->failure_);  // the function has caught it
  if (self->num_taken_ != self->num_expected_ && region.has_ended_) {
    throw_checkpoint_error(region.other_number(self->num_taken_));
  }
  for (size_t index = 0; index < self->num_expected_; ++index) {
    SavedMetadata& saved = region.saved_[index];
    if (!saved.is_wanted) continue;
    saved.value = std::move(self->values_[index].tensor);
    saved.value_version = self->values_[index].version;
  }
}

void CheckpointRegion::Recomputation::call_function(const std::shared_ptr<Recomputation>& self) {
  static PyMethodDef pack_method{"pack", &Recomputation::pack, METH_O, nullptr};
  static PyMethodDef unpack_method{"unpack", &Recomputation::unpack, METH_O, nullptr};
  const auto [args, kwargs] = region_->inputs_->get();  // may recompute an outer region
  const RandomStatesGuard random_states(region_->random_states_ ? &*region_->random_states_ : nullptr);
  const AutocastGuard autocast(region_->autocast_);
  const SwitchesGuard switches(region_->switches_);
  const at::AutoGradMode grad_mode(true);
  const HooksGuard hooks(&pack_method, capsule(self, kRecomputation), &unpack_method);
  const auto result =
      py::reinterpret_steal<py::object>(PyObject_Call(region_->function_.ptr(), args.ptr(), kwargs.ptr()));
  if (result) return;
  // An interrupt may have replaced the exception that ends the recomputation.
  if (!is_stopped_ || !PyErr_ExceptionMatches(recomputation_stopped())) throw py::error_already_set();
  PyErr_Clear();
}

at::Tensor CheckpointRegion::Recomputation::take(const at::Tensor& tensor) {
  const size_t index = num_taken_;
  if (index >= num_expected_) {
    // If the forward itself runs a backward, a complete recomputation saves more than the forward had saved by then.
    if (!region_->options_.early_stop && !region_->has_ended_) return tensor.detach();
    if (!region_->options_.early_stop) fail(region_->other_number(index + 1));
    is_stopped_ = true;
    return {};
  }
  ++num_taken_;
  const at::Tensor value = tensor.requires_grad() ? tensor.detach() : tensor;
  if (region_->saved_[index].is_wanted) {
    const std::string difference = this->difference(index, tensor);
    if (!difference.empty()) fail(difference);
    values_[index] = {value, value._version()};
  }
  // RReLU saves its input between its noise and the draw.
  const bool waits = may_be_filled_ && region_->saved_[index - 1].sizes == region_->saved_[index].sizes;
  may_be_filled_ = may_be_filled(region_->saved_[index], tensor);
  is_stopped_ = region_->options_.early_stop && num_taken_ == num_expected_ && !waits;
  return value;
}

// Describes how a recomputed tensor differs from the saved one; empty: it does not.
std::string CheckpointRegion::Recomputation::difference(size_t index, const at::Tensor& tensor) const {
  const SavedMetadata& before = region_->saved_[index];
  if (region_->options_.checks_metadata) {
    const SavedMetadata now(tensor);
    if (now.sizes != before.sizes || now.dtype != before.dtype || now.device != before.device) {
      return region_->changed(index, tensor);
    }
    if (has_outlived(before, tensor) && before.version != now.version) return region_->outliving_written(index, tensor);
  }
  const bool is_same = !before.hash || *before.hash == hash_of(tensor) || is_running_statistic(tensor);
  return is_same ? "" : region_->changed(index, tensor);
}

void CheckpointRegion::Recomputation::fail(std::string failure) {
  failure_ = std::move(failure);
  throw_checkpoint_error(failure_);
}

void register_checkpoint(py::module_& m) {
  m.def(
      "checkpoint",
      [](py::object function, py::tuple args, py::dict kwargs, bool preserve_rng_state, bool early_stop,
         bool checks_metadata, bool verify) {
        return CheckpointRegion::run(std::move(function), std::move(args), std::move(kwargs),
                                     {preserve_rng_state, early_stop, checks_metadata, verify});
      },
      py::arg("function"), py::arg("args"), py::arg("kwargs"), py::arg("preserve_rng_state"), py::arg("early_stop"),
      py::arg("checks_metadata"), py::arg("verify"));
  m.def("hash_tensor", [](const at::Tensor& tensor) { return hash_of(tensor); }, py::arg("tensor"));
}

}  // namespace drivetrain::recompute
